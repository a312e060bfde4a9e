# SPDX-License-Identifier: Apache-2.0
"""Tokens show what they are and do nothing else; numbers read well."""

import pytest

from gradloc.evidence.numbers import number
from gradloc.report import text
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "NaN"),
        (float("inf"), "∞"),
        (0.0, "0"),
        (1234, "1,234"),
        (747.6633, "747.7"),
        (14577.619, "14,578"),
        (0.00071, "0.00071"),
        (9.9999, "10"),
        (1e-9, "1e-9"),
        (3.2e12, "3.2e12"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_have_four_digits_a_whole_part_and_no_noise(value, shown):
    assert number(value) == shown


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


def test_the_replay_command_quotes_the_path():
    assert text.replay_command("/a b/c") == ("python -m verl.gradloc.replay '/a b/c' --model MODEL_PATH")
    assert text.replay_command(None) is None
