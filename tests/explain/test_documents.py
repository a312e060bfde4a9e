# SPDX-License-Identifier: Apache-2.0
"""What a document says of the token that is loud in it, at the edges of each kind."""

import math

import pytest

from gradloc.explain.documents import Document, cause_in, document_of, foreign_in, oddities, repeats_in, unspaced_in
from gradloc.record import Cause, Culprit
from tests.explain import a_culprit

LOW, ODD = "low_probability", {"foreign": 0.7, "foreign_of_batch": 0.2}
UNLIKELY = {"log_prob": -5.1, "log_prob_of_batch": -3.0}
CASES = [
    ({"padding": 4}, LOW, "token", -1.0, "padding_trained"),
    ({"padding": 3}, LOW, "token", -1.0, LOW),
    ({"log_prob": -5.0, "log_prob_shifted": -2.9}, LOW, "token", -1.0, "shifted_labels"),
    ({"log_prob": -5.0, "log_prob_shifted": -3.1}, LOW, "token", -1.0, LOW),
    ({"log_prob": -5.0, "log_prob_shifted": -2.9}, "loss_weight", "token", -1.0, "loss_weight"),
    ({"copies": 2, "rows": 14}, LOW, "token", -1.0, "duplicate_document"),
    ({"copies": 2, "rows": 15}, LOW, "token", -1.0, LOW),
    ({"copies": 1, "rows": 2}, LOW, "token", -1.0, "duplicate_document"),
    ({"copies": 0, "rows": 1}, LOW, "token", -1.0, LOW),
    ({**ODD, **UNLIKELY}, LOW, "token", -1.0, "odd_document"),
    ({**ODD, **UNLIKELY, "log_prob": -4.9}, LOW, "token", -1.0, LOW),
    (ODD, LOW, "token", -1.0, LOW),
    (ODD, LOW, "sequence", -1.0, "odd_document"),
    (UNLIKELY, LOW, "sequence", -1.0, "odd_document"),
    (UNLIKELY, LOW, "token", -1.0, LOW),
    ({}, LOW, "token", -7.0, "unexpected_token"),
    ({}, "unknown", "token", -7.0, "unexpected_token"),
    ({}, LOW, "token", -6.8, LOW),
    ({}, "unknown", "token", None, "unknown"),
    ({}, "extreme_advantage", "token", -7.0, "extreme_advantage"),
    ({"padding": 9}, "non_finite", "token", -7.0, "non_finite"),
    ({"padding": 9}, "non_finite_forward", "token", -7.0, "non_finite_forward"),
    ({"padding": 9}, "layer_heterogeneity", "token", -7.0, "layer_heterogeneity"),
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
        ({"repeats": 0.2, "repeats_of_batch": 0.06}, ["20%", "6%"]),
        ({"repeats": 0.19}, []),
        ({"repeats": 0.3, "repeats_of_batch": 0.1}, []),
        ({"foreign": 0.5}, ["50%", "0%"]),
        ({"unspaced": 40.0, "unspaced_of_batch": 13.0}, ["40", "13"]),
        ({"unspaced": 39.0}, []),
        ({"tokens": 301.0, "tokens_of_batch": 100.0}, ["301", "100"]),
        ({"tokens": 300.0, "tokens_of_batch": 100.0}, []),
    ],
)
def test_a_share_is_odd_at_three_times_the_batch_s(document, figures):
    said = oddities(Document(**document))
    assert len(said) == bool(figures) and all(figure in said[0] for figure in figures)


def test_a_text_is_measured_by_its_runs_its_characters_and_its_longest_word():
    assert repeats_in([1, 2]) == 0.0 and repeats_in([1] * 5) == pytest.approx(2 / 3)
    assert [foreign_in(char) for char in ("~", "\x7f", "é", "\x1f", "\x1b", "\n", " ", "")] == [0, 1, 1, 0, 1, 0, 0, 0]
    assert foreign_in("aé") == 0.5 and unspaced_in("a bcd\nef") == 3.0 and unspaced_in(" ") == 0.0
