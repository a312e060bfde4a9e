# SPDX-License-Identifier: Apache-2.0
"""What the golden events do not hold of the words: how text is cut, and that hostile text is made visible."""

import re

from gradloc.explain import story
from gradloc.explain.culprits import engine_words
from gradloc.explain.story import verdict_sentences
from gradloc.record import CAUSES
from tests.explain import event
from tests.report.builder import HOSTILE, make_culprit


def test_the_text_stands_around_the_largest_culprit_s_token():
    large = make_culprit(token=" is", text_before="1\n2\n3\n4\n" + "x" * 300 + "\nthe answer", text_after="y" * 300)
    told = story.quote_of(event(culprits=[make_culprit(share=0.1, grad_norm=9.0, token="no"), large]))
    assert told == ("x" * 188 + "↵\nthe answer", " is", "y" * 160)
    assert story.quote_of(event(culprits=[make_culprit(token="z" * 300)]))[1] == "z" * 200
    before, *_ = story.quote_of(event(culprits=[make_culprit(text_before="1\n2\n3\n4\n5")]))
    assert before.replace("↵", "") == "2\n3\n4\n5", "a chat's prompt has many short lines"
    assert story.quote_of(event(culprits=[])) is None


def test_a_clipped_step_says_how_much_of_the_healthy_gradient_is_left_by_the_bundle_s_clip_if_it_has_none():
    told = story.what_was_taken(event(), 0.5)
    assert "by 1,495" in told and told != story.what_was_taken(event())
    assert "to 0.1% of its size" in told, "to 0.77 / 1,495, where 0.5 would have been left without the spike"
    healthy = {"grad_clip": 2.0, "healthy_norm": 0.077, "is_taken": True}
    assert "to 10% of its size" in story.what_was_taken(event(consequence=healthy)), "which no clip at 2 touches"


def test_a_clipped_step_was_that_token_s_or_that_span_s():
    for span, whose in (("token", "that token's"), ("segment", "that span's"), ("sequence", "that response's")):
        assert f"was {whose}." in story.what_was_taken(event(culprits=[make_culprit(span=span)]), 0.5), span


def taken(how, **changes):
    return {"action": {"requested": how, "taken": how, "reason": ""}, **changes}


HEALER = {"name": "clip", "line": "a=1", "verdict": "healed", "norm_after": 3.04, "forwards": 4, "backwards": 4}


def test_a_step_that_was_healed_or_masked_is_told_with_its_setting_and_its_clip():
    healed, masked = (story.what_was_taken(event(**taken(how, cures=[HEALER])), 0.5) for how in ("heal", "mask"))
    assert "a=1" in healed and "3.04" in healed and story.what_was_taken(event(**taken("heal"))) != healed
    assert "0.77, clipped to 0.5" in masked and "clipped" not in story.what_was_taken(event(**taken("mask")), 0.77)


def test_weights_that_are_not_finite_make_every_further_step_so():
    cause = {"label": "non_finite_weights", "reason": "2", "numbers": {}, "names": [], "places": []}
    says = "Every further step will be like it"
    assert any(says in said for said in story.what_followed(event(culprits=[], cause=cause)))
    assert not any(says in said for said in story.what_followed(event()))


def test_what_engine_and_trainer_say_of_a_token_is_told_where_it_was_not_sampled():
    def said(label, old):
        numbers = {"log_prob": -2.0, "rollout_log_prob": -9.0, "old_log_prob_stored": old}
        culprit = make_culprit(cause={"label": label, "numbers": {}}, **numbers)
        return re.findall(r"-\d", engine_words(event(culprits=[culprit]).culprits[0]))

    assert said("not_sampled", -3.0) == ["-9", "-3", "-2"] and said("extreme_advantage", -3.0) == []
    assert said("not_sampled", -9.0) == said("shifted_log_probs", None) == ["-9", "-2"]


def test_the_certificate_s_reason_is_told_where_it_leaves_a_doubt():
    for doubt, is_told in (({"verdict": "undecided"}, True), ({"norm_after": None}, True), ({}, False)):
        made = vars(event().certificate) | {"reason": "for this"} | doubt
        assert ("for this" in verdict_sentences(event(certificate=made))) == is_told, doubt


def test_every_cause_is_said_without_its_numbers_and_with_hostile_tokens():
    for label in [*CAUSES, "brand_new"]:
        culprit = make_culprit(token="".join(HOSTILE), cause={"label": label, "numbers": {}})
        said = verdict_sentences(event(culprits=[culprit]))
        assert said.isprintable() and "{" not in said and "None" not in said, label
