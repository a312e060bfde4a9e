# SPDX-License-Identifier: Apache-2.0
"""What the golden events do not hold of the words: how text is cut, and that hostile text is made visible."""

import pytest

from gradloc.record import CAUSES
from gradloc.words import story
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


@pytest.mark.parametrize("label", [*CAUSES, "brand_new"])
def test_every_cause_is_said_without_its_numbers_and_with_hostile_tokens(label):
    culprit = make_culprit(token="".join(HOSTILE), cause={"label": label, "numbers": {}})
    said = verdict_sentences(event(culprits=[culprit]))
    assert said.isprintable() and "{" not in said and "None" not in said
