# SPDX-License-Identifier: Apache-2.0
"""What the golden events do not hold of the words: how text is cut, and that hostile text is made visible."""

import re

import pytest

from gradloc.record import CAUSES
from gradloc.words import story
from gradloc.words.culprits import engine_words
from gradloc.words.story import verdict_sentences
from tests.report.builder import HOSTILE, make_culprit
from tests.words import event


def test_the_text_stands_around_the_largest_culprit_s_token():
    large = make_culprit(token=" is", text_before="1\n2\n3\n4\n" + "x" * 300 + "\nthe answer", text_after="y" * 300)
    told = story.tell(event(culprits=[make_culprit(share=0.1, grad_norm=9.0, token="no"), large]), 1.0)
    assert (told.before, told.token, told.after) == ("x" * 188 + "↵\nthe answer", " is", "y" * 160)
    assert story.tell(event(culprits=[make_culprit(token="z" * 300)])).token == "z" * 200
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


GIVEN = [
    (taken("heal", cures=[HEALER]), 1.0, ["a=1", "3.04"]),
    (taken("heal"), 1.0, []),
    (taken("abort"), 1.0, []),
    (taken("skip"), 1.0, []),
    (taken("mask"), 0.5, ["0.77", "0.5"]),
    ({}, None, []),
    ({}, 1e3, ["1,000"]),
    ({}, 0.5, ["0.5", "1,495", "75%"]),
    (INFINITE, 1.0, []),
    (INFINITE | {"consequence": {"is_taken": True}}, 1.0, []),
]


def test_whatever_the_optimizer_was_given_is_told_apart_with_its_figures():
    told = [(story.given(event(**changes), clip), figures) for changes, clip, figures in GIVEN]
    assert len({said for said, _ in told}) == len(told) and all(said for said, _ in told)
    for said, figures in told:
        assert all(figure in said for figure in figures), said


def test_weights_that_are_not_finite_make_every_further_step_so():
    cause = {"label": "non_finite_weights", "reason": "2", "numbers": {}, "names": [], "places": []}
    says = "Every further step will be like it"
    assert any(says in said for said in story.tell(event(culprits=[], cause=cause)).given)
    assert not any(says in said for said in story.tell(event()).given)


def test_what_engine_and_trainer_say_of_a_token_is_told_where_it_was_not_sampled():
    def said(label, old):
        numbers = {"log_prob": -2.0, "rollout_log_prob": -9.0, "old_log_prob_stored": old}
        culprit = make_culprit(cause={"label": label, "numbers": {}}, **numbers)
        return re.findall(r"-\d", engine_words(event(culprits=[culprit]).culprits[0]))

    assert said("not_sampled", -3.0) == ["-9", "-3", "-2"] and said("extreme_advantage", -3.0) == []
    assert said("not_sampled", -9.0) == said("shifted_log_probs", None) == ["-9", "-2"]


SEARCH, WEIGHTS = event().search, {"label": "non_finite_weights", "reason": "2", "numbers": {}}


NORMS = [
    ({}, {}, ["748", "14.3", "52.3", "0.77", "0.0007"]),
    ({"verdict": "undecided"}, {}, ["0.77", "for this"]),
    ({"verdict": "not_explained"}, {}, ["0.77"]),
    (
        {"verdict": "not_explained"},
        {"search": vars(SEARCH) | {"num_more": 3, "more_norm": 60.0}},
        ["0.77", "search.max_culprits", "3 culprits", "60"],
    ),
    ({"norm_after": None}, {}, ["748", "not known: for this"]),
    ({"norm_after": None, "reason": ""}, {}, ["748"]),
    ({}, {"culprits": [], "cause": WEIGHTS}, ["748", "0.77"]),
    ({"method": "none"}, {"culprits": [], "cause": WEIGHTS}, ["748"]),
    ({}, {"culprits": [], "trigger": INFINITE["trigger"]}, ["not finite"]),
]


def test_the_norm_with_and_without_what_made_it_is_told_as_it_was_certified():
    told = []
    for certificate, changes, figures in NORMS:
        made = vars(event().certificate) | {"reason": "for this"} | certificate
        said = verdict_sentences(event(certificate=made, **changes))
        assert all(figure in said for figure in figures), said
        assert ("0.77" in said) == ("0.77" in figures), "what is not known, or no culprit's, is not told"
        told.append(said)
    assert len({*told}) == len(told)


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_without_its_numbers_and_with_hostile_tokens(label):
    culprit = make_culprit(token="".join(HOSTILE), cause={"label": label, "numbers": {}})
    said = verdict_sentences(event(culprits=[culprit]))
    assert said.isprintable() and "{" not in said and "None" not in said
