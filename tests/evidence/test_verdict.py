# SPDX-License-Identifier: Apache-2.0
"""The verdict in two sentences."""

import pytest

from gradloc.evidence.record import CAUSES, Event
from gradloc.evidence.verdict import verdict_sentences
from gradloc.report.runs.events import convert
from tests.report.builder import HOSTILE, make_culprit, make_event


def said_of(document: dict) -> str:
    return verdict_sentences(convert(document, Event))


def test_one_token_is_named_with_its_share_its_cause_and_the_norm_without_it():
    assert said_of(make_event()) == (
        "At step 5 the gradient norm was 748, 14.3 times the threshold of 52.3: "
        'the token " is" at position 3 of the response 3c0f6a52:1 carries 75% of it, '
        "because the advantage there is 14,578 times typical. "
        "Without that token the norm is 0.77 (within 0.0007), "
        "under the threshold of 52.3: the spike is explained."
    )


def test_several_culprits_are_counted_and_the_largest_named():
    said = said_of(make_event(culprits=[make_culprit(share=0.2), make_culprit(7, token=" 7", share=0.79)]))
    assert '2 culprits carry 99% of it, the largest the token " 7" at position 7' in said
    assert "Without them the norm is" in said


def test_a_step_without_a_culprit_says_why_the_search_stopped():
    said = said_of(make_event(culprits=[]))
    assert "no token was found that carries it. The search stopped because every part" in said


@pytest.mark.parametrize("norm", ["NaN", "Infinity", "-Infinity"])
def test_a_gradient_that_is_not_finite_reads_so(norm):
    found = make_event()
    found["trigger"]["grad_norm"] = norm
    found["culprits"][0].update(share=None, cause={"label": "non_finite", "numbers": {}})
    said = said_of(found)
    assert said.startswith("At step 5 the gradient was not finite: the token")
    assert "made it, because its loss has no finite gradient." in said


def test_a_rehearsal_is_called_one():
    found = make_event()
    found["trigger"]["kind"] = "forced"
    assert "(a rehearsal: this step was asked for)" in said_of(found)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("not_explained", "still over the threshold of 52.3: something else spikes, too."),
        ("undecided", "and whether that explains the spike is undecided: because so."),
    ],
)
def test_a_certificate_that_does_not_explain_says_so(verdict, words):
    found = make_event()
    found["certificate"].update(verdict=verdict, reason="because so")
    assert said_of(found).endswith(words)


def test_an_unknown_norm_without_the_culprits_is_not_made_up():
    found = make_event()
    found["certificate"].update(norm_after="NaN", reason="the rest is not finite")
    assert said_of(found).endswith("is not known: the rest is not finite.")


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_in_words(label):
    found = make_event(culprits=[make_culprit(cause={"label": label, "numbers": {}})])
    said = said_of(found)
    assert "{" not in said
    assert said.count(". ") == 1


def test_hostile_tokens_are_printable_and_a_run_without_text_names_numbers():
    for token in HOSTILE:
        said = said_of(make_event(culprits=[make_culprit(token=token)]))
        assert said.isprintable()
    said = said_of(make_event(culprits=[make_culprit(tokens=None)]))
    assert 'the token "<1003>"' in said


def test_a_culprit_behind_a_tools_answer_is_placed_in_its_turn():
    said = said_of(make_event(culprits=[make_culprit(turn={"number": 2, "num_turns": 3, "num_before": 14})]))
    assert ":1, in turn 2 of 3 after the tool's answer of 14 tokens, carries" in said
    assert "of the response 3c0f6a52:1, in turn 1 of 3, carries" in said_of(
        make_event(culprits=[make_culprit(turn={"number": 1, "num_turns": 3, "num_before": 0})])
    )
