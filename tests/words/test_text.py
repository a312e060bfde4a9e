# SPDX-License-Identifier: Apache-2.0
"""Tokens show what they are and do nothing else."""

import pytest

from gradloc.words import text
from tests.report.builder import HOSTILE, VISIBLE


@pytest.mark.parametrize(("token", "shown"), list(zip(HOSTILE, VISIBLE, strict=True)))
def test_hostile_tokens_are_made_visible(token, shown):
    assert text.visible(token) == shown


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\ud800", "\ufffd"),
        ("\u200b", "⟨U+200B⟩"),
        ("\u200d", "⟨U+200D⟩"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("a\tb", "a⇥\tb"),
        ("plain", "plain"),
        ("", ""),
        ("\u2028", "⟨U+2028⟩"),
        ("é", "é"),
    ],
)
def test_what_would_not_show_is_named(token, shown):
    assert text.visible(token) == shown


def test_one_line_is_one_line_and_cut_at_the_end_asked_for():
    assert text.one_line("a\nb\tc") == "a↵b⇥c"
    assert text.one_line("abcdef", 4) == "abc…"
    assert text.one_line("abcdef", 4, keep="end") == "…def"


@pytest.mark.parametrize(
    ("positions", "shown"),
    [([], "–"), ([9], "9"), ([9, 10, 11], "9 to 11"), ([9, 20], "9 to 20 (2 of them)")],
)
def test_positions_read_as_a_span(positions, shown):
    assert text.span(positions) == shown
