# SPDX-License-Identifier: Apache-2.0
"""What a document says of the token that is loud in it."""

import math

import pytest

from gradloc.explain.documents import Document, cause_in, document_of, foreign_in, oddities, repeats_in, unspaced_in
from gradloc.record import Cause, Culprit
from tests.explain import a_culprit

LOW, ODD = "low_probability", {"foreign": 0.7, "foreign_of_batch": 0.2}
UNLIKELY = {"log_prob": -5.1, "log_prob_of_batch": -3.0}
SHIFTED = {"log_prob": -5.0, "log_prob_shifted": -2.0}
CASES = [
    ({"padding": 9}, LOW, "token", -1.0, "padding_trained"),
    ({"padding": 1}, LOW, "token", -1.0, LOW),
    (SHIFTED, LOW, "token", -1.0, "shifted_labels"),
    ({**SHIFTED, "log_prob_shifted": -4.0}, LOW, "token", -1.0, LOW),
    (SHIFTED, "loss_weight", "token", -1.0, "loss_weight"),
    ({"copies": 2, "rows": 8}, LOW, "token", -1.0, "duplicate_document"),
    ({"copies": 2, "rows": 30}, LOW, "token", -1.0, LOW),
    ({"copies": 1, "rows": 2}, LOW, "token", -1.0, "duplicate_document"),
    ({"copies": 0, "rows": 1}, LOW, "token", -1.0, LOW),
    ({**ODD, **UNLIKELY}, LOW, "token", -1.0, "odd_document"),
    *((half, LOW, "token", -1.0, LOW) for half in (ODD, UNLIKELY)),
    *((half, LOW, "sequence", -1.0, "odd_document") for half in (ODD, UNLIKELY)),
    *(({}, label, "token", -8.0, "unexpected_token") for label in (LOW, "unknown")),
    ({}, LOW, "token", -5.0, LOW),
    ({}, "unknown", "token", None, "unknown"),
    ({}, "extreme_advantage", "token", -8.0, "extreme_advantage"),
    *(({"padding": 9}, of, "token", -8.0, of) for of in ("non_finite", "non_finite_forward", "layer_heterogeneity")),
]


@pytest.mark.parametrize(("document", "label", "span", "log_prob", "wanted"), CASES)
def test_the_document_decides_what_the_factors_leave_open(document, label, span, log_prob, wanted):
    made = cause_in(a_culprit(span=span, log_prob=log_prob), Cause(label, {"kl": None}), Document(**document))
    assert made.label == wanted and made.numbers["kl"] is None
    probability = None if log_prob is None else pytest.approx(math.exp(log_prob))
    assert made.numbers.get("probability") == probability
    assert document_of(made.numbers) == Document(**document), "the record keeps all of it"


def test_nothing_is_made_up_of_a_document_of_which_nothing_is_known():
    numbers = cause_in(Culprit(), Cause(), Document()).numbers
    assert {name.removeprefix("document_"): value for name, value in numbers.items() if value} == {"rows": 1.0}
    assert oddities(Document()) == []


@pytest.mark.parametrize(
    ("document", "figures"),
    [
        ({"repeats": 0.25, "repeats_of_batch": 0.06}, ["25%", "6%"]),
        ({"repeats": 0.1}, []),
        ({"repeats": 0.3, "repeats_of_batch": 0.2}, []),
        ({"foreign": 0.5}, ["50%", "0%"]),
        ({"unspaced": 60.0, "unspaced_of_batch": 13.0}, ["60", "13"]),
        ({"unspaced": 20.0}, []),
        ({"tokens": 400.0, "tokens_of_batch": 100.0}, ["400", "100"]),
        ({"tokens": 200.0, "tokens_of_batch": 100.0}, []),
    ],
)
def test_a_share_is_odd_where_it_is_far_over_the_batch_s(document, figures):
    said = oddities(Document(**document))
    assert len(said) == bool(figures) and all(figure in said[0] for figure in figures)


def test_a_text_is_measured_by_its_runs_its_characters_and_its_longest_word():
    assert repeats_in([1, 2]) == 0.0 and repeats_in([1] * 5) == pytest.approx(2 / 3)
    assert [foreign_in(char) for char in ("~", "\x7f", "é", "\x1f", "\x1b", "\n", " ", "")] == [0, 1, 1, 0, 1, 0, 0, 0]
    assert foreign_in("aé") == 0.5 and unspaced_in("a bcd\nef") == 3.0 and unspaced_in(" ") == 0.0
