# SPDX-License-Identifier: Apache-2.0
"""What the golden events do not hold of the words: how text is cut, and that hostile text is made visible."""

import pytest

from gradloc.record import CAUSES
from gradloc.words import story
from gradloc.words.culprits import engine_words
from gradloc.words.verdict import verdict_sentences
from tests.report.builder import HOSTILE, make_culprit
from tests.words import event


def test_the_text_stands_around_the_largest_culprit_s_token():
    large = make_culprit(token=" is", text_before="1\n2\n3\n4\n" + "x" * 300 + "\nthe answer", text_after="y" * 300)
    told = story.tell(event(culprits=[make_culprit(share=0.1, grad_norm=9.0, token="no"), large]), 1.0)
    assert (told.before, told.token, told.after) == ("x" * 188 + "↵\nthe answer", " is", "y" * 160)
    short = story.tell(event(culprits=[make_culprit(text_before="1\n2\n3\n4\n5")]))
    assert short.before.replace("↵", "") == "2\n3\n4\n5", "a chat's prompt has many short lines"


def test_the_clip_of_a_bundle_is_told_where_the_event_has_none():
    assert "1/1,495" in story.given(event(), 0.5) and story.given(event()) != story.given(event(), 0.5)


def test_a_clipped_step_says_how_much_of_the_healthy_gradient_is_left():
    assert "to 0.1%" in story.given(event(), 0.5), "to 0.77 / 1,495, where 0.5 would have been left without the spike"
    healthy = {"grad_clip": 2.0, "healthy_norm": 0.077, "is_taken": True}
    assert "to 10%" in story.given(event(consequence=healthy)), "of 0.77, which no clip at 2 touches"


def taken(how, **changes):
    return {"action": {"requested": how, "taken": how, "reason": ""}, **changes}


HEALER = {"name": "clip", "line": "a=1", "verdict": "healed", "norm_after": 3.04, "forwards": 4, "backwards": 4}
INFINITE = {"trigger": {"kind": "non_finite", "grad_norm": "Infinity", "threshold": 52.26, "tau": 640.0}}


@pytest.mark.parametrize(
    ("changes", "clip", "said"),
    [
        (taken("heal", cures=[HEALER]), 1.0, "The optimizer took the step under a=1, of norm 3.04."),
        (taken("heal"), 1.0, "The optimizer took the step under another setting."),
        (taken("abort"), 1.0, "The run was stopped before the step was taken."),
        (taken("skip"), 1.0, "The optimizer took no step: this mini-batch was skipped."),
        (taken("mask"), 0.5, "The optimizer took the step without it, of norm 0.77, clipped to 0.5."),
        ({}, None, "The optimizer took the step with the spike in it."),
        ({}, 1e3, "The optimizer took the step as it was: its norm is within the clip limit of 1,000."),
        (INFINITE, 1.0, "The trainer skipped the step, because its norm was not finite."),
        (
            INFINITE | {"consequence": {"is_taken": True}},
            1.0,
            "The optimizer took the step, so the weights are not finite any more.",
        ),
    ],
)
def test_what_the_optimizer_was_given_is_said_in_one_sentence(changes, clip, said):
    assert story.given(event(**changes), clip) == said


def test_weights_that_are_not_finite_make_every_further_step_so():
    cause = {"label": "non_finite_weights", "reason": "2", "numbers": {}, "names": [], "places": []}
    says = "Every further step will be like it"
    assert any(says in said for said in story.tell(event(culprits=[], cause=cause)).given)
    assert not any(says in said for said in story.tell(event()).given)


@pytest.mark.parametrize(
    ("label", "old", "said"),
    [
        ("not_sampled", -3.0, ": the engine says log-prob -9, the trainer -3 before the update and -2 now"),
        ("not_sampled", -9.0, ": the engine says log-prob -9, the trainer -2 now"),
        ("extreme_advantage", -3.0, ""),
    ],
)
def test_what_engine_and_trainer_say_of_a_token(label, old, said):
    numbers = {"log_prob": -2.0, "rollout_log_prob": -9.0, "old_log_prob_stored": old}
    culprit = make_culprit(cause={"label": label, "numbers": {}}, **numbers)
    assert engine_words(event(culprits=[culprit]).culprits[0]) == said


SEARCH, WEIGHTS = event().search, {"label": "non_finite_weights", "reason": "2", "numbers": {}}


@pytest.mark.parametrize(
    ("certificate", "changes", "said"),
    [
        ({}, {}, "; 0.77 (within 0.0007) without it: the spike is explained."),
        ({"verdict": "undecided"}, {}, " without it. Whether that explains the spike is undecided: for this."),
        ({"verdict": "not_explained"}, {}, " without it, still over the threshold: something else spikes, too."),
        (
            {"verdict": "not_explained"},
            {"search": vars(SEARCH) | {"num_more": 3, "more_norm": 60.0}},
            "threshold: search.max_culprits ended the search, and at least 3 culprits of about 60 are left.",
        ),
        ({"norm_after": None}, {}, "; the norm without it is not known: for this."),
        ({"norm_after": None, "reason": ""}, {}, "times the threshold of 52.3."),
        ({}, {"culprits": [], "cause": WEIGHTS}, "; 0.77 (within 0.0007) without that."),
        ({"method": "none"}, {"culprits": [], "cause": WEIGHTS}, "The norm was 748, 14.3 times the threshold of 52.3."),
        ({}, {"culprits": [], "trigger": INFINITE["trigger"]}, "The norm was not finite."),
    ],
)
def test_the_norm_with_and_without_what_made_it_and_what_that_proves(certificate, changes, said):
    made = vars(event().certificate) | {"reason": "for this"} | certificate
    assert verdict_sentences(event(certificate=made, **changes)).split("\n")[0].count(said) == 1


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_without_its_numbers_and_with_hostile_tokens(label):
    culprit = make_culprit(token="".join(HOSTILE), cause={"label": label, "numbers": {}})
    said = verdict_sentences(event(culprits=[culprit]))
    assert said.isprintable() and "{" not in said and "None" not in said
