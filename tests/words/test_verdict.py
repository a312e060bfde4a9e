# SPDX-License-Identifier: Apache-2.0
"""The verdict in a few sentences."""

import pytest

from gradloc.record import CAUSES
from gradloc.words.culprits import shares_sentence
from gradloc.words.verdict import verdict_sentences
from tests.report.builder import HOSTILE, UNTRUSTED, UNTRUSTED_SAID, make_culprit
from tests.words import event


def said_of(**changes) -> str:
    return verdict_sentences(event(**changes))


def test_one_token_is_named_with_its_share_its_cause_and_the_norm_without_it():
    assert said_of() == (
        "One token made the step-5 spike. "
        'It is the token " is" at position 3 of the response 3c0f6a52:1. '
        "It carries 75% of the gradient. The advantage is extreme: 14,578 times typical. "
        "The norm was 748, 14.3 times the threshold of 52.3; 0.77 (within 0.0007) without it: the spike is explained. "
        "The optimizer took the step with the spike in it."
    )


def test_a_step_without_a_culprit_says_why_the_search_stopped():
    said = said_of(culprits=[])
    assert said.startswith("Nothing was found that made the spike at step 5. The search stopped because every part")
    assert "The norm was 748, 14.3 times the threshold of 52.3." in said


@pytest.mark.parametrize("norm", ["NaN", "Infinity", "-Infinity"])
def test_a_gradient_that_is_not_finite_reads_so(norm):
    culprit = make_culprit(share=None, cause={"label": "non_finite", "numbers": {}})
    said = said_of(culprits=[culprit], trigger={"grad_norm": norm})
    assert said.startswith("One token made the gradient of step 5 not finite. It is the token")
    assert "A loss without a finite gradient." in said and "The norm was not finite; 0.77" in said


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("not_explained", "without it, still over the threshold: something else spikes, too."),
        ("undecided", "without it. Whether that explains the spike is undecided: because so."),
    ],
)
def test_a_certificate_that_does_not_explain_says_so(verdict, words):
    assert words in said_of(certificate={"verdict": verdict, "reason": "because so"})


def test_an_unknown_norm_without_the_culprits_is_not_made_up():
    said = said_of(certificate={"norm_after": "NaN", "reason": "the rest is not finite"})
    assert "; the norm without it is not known: the rest is not finite." in said


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_in_words(label):
    said = said_of(culprits=[make_culprit(cause={"label": label, "numbers": {}})])
    assert "{" not in said and "None" not in said


def test_hostile_tokens_are_printable_and_a_run_without_text_names_numbers():
    assert all(said_of(culprits=[make_culprit(token=token)]).isprintable() for token in HOSTILE)
    assert 'the token "<1003>"' in said_of(culprits=[make_culprit(tokens=None)])


def test_a_culprit_behind_a_tools_answer_is_placed_in_its_turn():
    said = said_of(culprits=[make_culprit(turn={"number": 2, "num_turns": 3, "num_before": 14})])
    assert ":1, in turn 2 of 3 after the tool's answer of 14 tokens. It carries" in said
    said = said_of(culprits=[make_culprit(turn={"number": 1, "num_turns": 3, "num_before": 0})])
    assert "of the response 3c0f6a52:1, in turn 1 of 3. It carries" in said


# ---- how well it is known


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"closure": 0.98, "closure_error": 0.05, "is_trusted": True}, "The measured shares add up to 0.98 +- 0.05."),
        ({"closure": 0.98, "is_trusted": True}, "The measured shares add up to 0.98."),
        (UNTRUSTED, UNTRUSTED_SAID),
        (None, ""),
    ],
    ids=["trusted", "old", "untrusted", "not measured"],
)
def test_what_the_shares_add_up_to_is_a_sentence(shares, said):
    assert shares_sentence(event(shares=shares)) == said


def test_a_bound_of_more_than_half_the_norm_is_not_told_as_an_error_of_it():
    cause = {"label": "non_finite_padding", "reason": "only padding is not finite", "names": [], "places": []}
    padding = {"culprits": [], "cause": cause}
    assert "; 0.77 (within 0.0007) without that." in said_of(**padding)
    for found, words in (({}, "without it: the spike is explained"), (padding, "without that.")):
        said = said_of(**found, certificate={"norm_after": 1.38, "error_bound": 2.562})
        assert f"; at most 3.95 {words}" in said and "1.38" not in said
