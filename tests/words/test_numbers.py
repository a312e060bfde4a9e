# SPDX-License-Identifier: Apache-2.0
"""Numbers read well, and never better than they are known."""

import random

import pytest

from gradloc.words.numbers import bounded, number, percent, with_error


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "NaN"),
        (float("inf"), "∞"),
        (-float("inf"), "-∞"),
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


def test_what_is_no_finite_share_has_no_percent():
    assert [percent(value) for value in (None, float("nan"), 0.5)] == ["–", "NaN", "50%"]


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (0.98, 0.05, "0.98 +- 0.05"),
        (0.98, 0.0, "0.98"),
        (0.98, 9e-5, "0.98"),
        (-12.0, 0.001, "-12"),
        (0.98, None, "0.98"),
        (0.98, float("nan"), "0.98"),
        (0.98, float("inf"), "0.98 +- ∞"),
        (None, 0.05, "–"),
        (float("nan"), 0.05, "NaN"),
    ],
)
def test_a_standard_error_is_said_where_it_can_be_seen(value, error, said):
    assert with_error(value, error) == said


@pytest.mark.parametrize(
    ("norm", "bound", "said"),
    [
        (0.77, 0.0007, ("0.77", " (within 0.0007)")),
        (1147.0, 114.7, ("1,147", " (within 115)")),
        (4.0, 2.0, ("4", " (within 2)")),
        (4.0, 2.001, ("at most 6.01", "")),
        (1.38, 2.562, ("at most 3.95", "")),
        (0.0, 0.1, ("at most 0.1", "")),
        (4.0, 0.0, ("4", "")),
        (4.0, None, ("4", "")),
        (4.0, float("inf"), ("4", "")),
        (4.0, float("nan"), ("4", "")),
        (float("nan"), 1.0, ("NaN", "")),
        (None, 1.0, ("–", "")),
    ],
)
def test_a_bound_of_more_than_half_the_norm_leaves_what_the_norm_is_at_most(norm, bound, said):
    assert bounded(norm, bound, 3) == said


@pytest.mark.parametrize("digits", [3, 4, 6])
def test_what_is_said_of_a_bound_is_never_less_than_it_is(digits):
    source = random.Random(digits)
    for _ in range(500):
        norm, bound = (10 ** source.uniform(-3, 5) for _ in range(2))
        said, margin = bounded(norm, bound, digits)
        if bound > norm / 2:
            assert float(said.removeprefix("at most ").replace(",", "")) >= (norm + bound) * (1 - 1e-12)
        else:
            assert float(margin.removeprefix(" (within ").removesuffix(")").replace(",", "")) >= bound * (1 - 1e-12)
