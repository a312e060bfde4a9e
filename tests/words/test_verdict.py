# SPDX-License-Identifier: Apache-2.0
"""The verdict in a few sentences."""

import pytest

from gradloc.record import CAUSES, Event
from gradloc.record.reading import read
from gradloc.words.shares import shares_sentence
from gradloc.words.verdict import verdict_sentences
from tests.report.builder import HOSTILE, UNTRUSTED, UNTRUSTED_SAID, make_culprit, make_event


def said_of(document: dict) -> str:
    return verdict_sentences(read(Event, document))


def test_one_token_is_named_with_its_share_its_cause_and_the_norm_without_it():
    assert said_of(make_event()) == (
        "One token made the step-5 spike. "
        'It is the token " is" at position 3 of the response 3c0f6a52:1. '
        "It carries 75% of the gradient. The advantage is extreme: 14,578 times typical. "
        "The norm was 748, 14.3 times the threshold of 52.3; 0.77 (within 0.0007) without it: the spike is explained. "
        "The optimizer took the step with the spike in it."
    )


def test_several_culprits_are_counted_and_the_largest_named():
    said = said_of(make_event(culprits=[make_culprit(share=0.2), make_culprit(7, token=" 7", share=0.79)]))
    assert said.startswith("Two tokens made the step-5 spike. ")
    assert 'The largest is the token " 7" at position 7' in said and "Together they carry 99% of the gradient." in said
    assert "0.77 (within 0.0007) without them" in said


def test_a_step_without_a_culprit_says_why_the_search_stopped():
    said = said_of(make_event(culprits=[]))
    assert said.startswith("Nothing was found that made the spike at step 5. The search stopped because every part")


@pytest.mark.parametrize("norm", ["NaN", "Infinity", "-Infinity"])
def test_a_gradient_that_is_not_finite_reads_so(norm):
    found = make_event()
    found["trigger"]["grad_norm"] = norm
    found["culprits"][0].update(share=None, cause={"label": "non_finite", "numbers": {}})
    said = said_of(found)
    assert said.startswith("One token made the gradient of step 5 not finite. It is the token")
    assert "A loss without a finite gradient." in said and "The norm was not finite; 0.77" in said


@pytest.mark.parametrize(
    "is_taken, said",
    [
        (True, "The optimizer took the step: the weights that it moved are not finite any more."),
        (False, "The trainer skipped the step, because its norm was not finite."),
        (None, "The trainer skipped the step, because its norm was not finite."),
    ],
)
def test_what_became_of_a_step_that_is_not_finite_is_a_fact_of_the_record(is_taken, said):
    found = make_event(consequence={"grad_clip": 1.0, "is_taken": is_taken})
    found["trigger"]["grad_norm"] = "NaN"
    assert said_of(found).endswith(said)


def test_a_rehearsal_is_called_one():
    found = make_event()
    found["trigger"]["kind"] = "forced"
    assert "(a rehearsal)" in said_of(found)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("not_explained", "without it, still over the threshold: something else spikes, too."),
        ("undecided", "without it. Whether that explains the spike is undecided: because so."),
    ],
)
def test_a_certificate_that_does_not_explain_says_so(verdict, words):
    found = make_event()
    found["certificate"].update(verdict=verdict, reason="because so")
    assert words in said_of(found)


def test_an_unknown_norm_without_the_culprits_is_not_made_up():
    found = make_event()
    found["certificate"].update(norm_after="NaN", reason="the rest is not finite")
    assert "; without it it is not known: the rest is not finite." in said_of(found)


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_in_words(label):
    found = make_event(culprits=[make_culprit(cause={"label": label, "numbers": {}})])
    said = said_of(found)
    assert "{" not in said and "None" not in said


def test_hostile_tokens_are_printable_and_a_run_without_text_names_numbers():
    for token in HOSTILE:
        said = said_of(make_event(culprits=[make_culprit(token=token)]))
        assert said.isprintable()
    said = said_of(make_event(culprits=[make_culprit(tokens=None)]))
    assert 'the token "<1003>"' in said


def test_a_culprit_behind_a_tools_answer_is_placed_in_its_turn():
    said = said_of(make_event(culprits=[make_culprit(turn={"number": 2, "num_turns": 3, "num_before": 14})]))
    assert ":1, in turn 2 of 3 after the tool's answer of 14 tokens. It carries" in said
    assert "of the response 3c0f6a52:1, in turn 1 of 3. It carries" in said_of(
        make_event(culprits=[make_culprit(turn={"number": 1, "num_turns": 3, "num_before": 0})])
    )


# ---- how well it is known


def test_a_share_is_told_with_its_standard_error_where_that_is_known():
    assert "carries 75% +- 0.4% of the gradient" in said_of(make_event(culprits=[make_culprit(share_error=0.004)]))
    assert "carries 75% of the gradient" in said_of(make_event(culprits=[make_culprit(share_error=0.0)]))
    two = [make_culprit(share=0.2, share_error=0.03), make_culprit(7, share=0.79, share_error=0.04)]
    assert "Together they carry 99% +- 5% of the gradient" in said_of(make_event(culprits=two))


def test_what_the_optimizer_was_given_is_told_with_the_same_error():
    consequence = {"grad_clip": 1.0, "clip_scale": 0.5, "culprit_share": 0.75}
    found = make_event(culprits=[make_culprit(share_error=0.004)], consequence=consequence)
    assert "75% +- 0.4% of what the optimizer took was that token's" in said_of(found)


def test_a_share_that_is_not_trusted_is_told_only_where_a_backward_of_its_own_measured_it():
    consequence = {"grad_clip": 1.0, "clip_scale": 0.5, "culprit_share": 0.75}
    of_tokens = make_culprit(is_exact=False, share_error=0.1)
    said = said_of(make_event(culprits=[of_tokens], shares=UNTRUSTED, consequence=consequence))
    assert "%" not in said.partition(" That left")[0]
    assert "75%" in said_of(make_event(culprits=[make_culprit()], shares=UNTRUSTED, consequence=consequence))
    trusted = make_event()["shares"]
    assert "75% +- 10%" in said_of(make_event(culprits=[of_tokens], shares=trusted, consequence=consequence))


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
    assert shares_sentence(read(Event, make_event(shares=shares))) == said


def test_a_bound_of_more_than_half_the_norm_is_not_told_as_an_error_of_it():
    found = make_event()
    found["certificate"].update(norm_after=1.38, error_bound=2.562)
    said = said_of(found)
    assert "; at most 3.95 without it: the spike is explained" in said
    assert "1.38" not in said and "2.56" not in said


def test_the_same_is_told_where_no_token_made_it():
    cause = {
        "label": "non_finite_padding",
        "reason": "only padding is not finite",
        "numbers": {},
        "names": [],
        "places": [],
    }
    found = make_event(culprits=[], cause=cause)
    assert "; 0.77 (within 0.0007) without that." in said_of(found)
    found["certificate"].update(norm_after=1.38, error_bound=2.562)
    assert "; at most 3.95 without that." in said_of(found)
