# SPDX-License-Identifier: Apache-2.0
"""Numbers read well, and never better than they are known; tokens show what they are and do nothing else."""

import math
import random

import pytest

from gradloc.explain.numbers import bounded, number, percent, with_error
from gradloc.explain.text import one_line, span, times, visible
from tests.report.builder import HOSTILE, VISIBLE

NAN, INF = math.nan, math.inf
# beside the docstrings' own
NUMBERS = [(INF, "∞"), (-INF, "-∞"), (0.0, "0"), (1234, "1,234"), (747.6633, "747.7")]
NUMBERS += [(9.9999, "10"), (1e-9, "1e-9"), (-0.5, "-0.5")]
PERCENTS = [(NAN, "NaN"), (0.5, "50%")]
ERRORS = [(-12.0, 0.001, "-12"), (0.98, INF, "0.98 +- ∞"), (None, 0.05, "–"), (NAN, 0.05, "NaN")]
ERRORS += [(0.98, unseen, "0.98") for unseen in (0.0, 9e-5, NAN)]
BOUNDS = [(1147.0, 114.7, "1,147 (error up to 115)"), (4.0, 2.0, "4 (error up to 2)")]
BOUNDS += [(4.0, 2.001, "at most 6.01"), (1.38, 2.562, "at most 3.95"), (0.0, 0.1, "at most 0.1")]
BOUNDS += [(NAN, 1.0, "NaN"), (None, 1.0, "–"), *((4.0, unknown, "4") for unknown in (0.0, None, INF, NAN))]
TEXTS = [*zip(HOSTILE, VISIBLE, strict=True), ("\ud800", "\ufffd"), ("\u200b", "⟨U+200B⟩"), ("\u200d", "⟨U+200D⟩")]
TEXTS += [("a\tb", "a⇥\tb"), ("\u2028", "⟨U+2028⟩"), *((same, same) for same in ("plain", "", "é", "👩\u200d🚀"))]
TIMES = [(6.0, 2.0, 3.0), (0.0, 2.0, 0.0), (INF, 2.0, None), (NAN, 2.0, None), (None, 2.0, None), (6.0, None, None)]
TIMES += [(6.0, 0.0, None)]
SPANS = [([], "–"), ([9], "9"), ([9, 10, 11], "9 to 11"), ([9, 20], "9 to 20 (2 of them)")]


@pytest.mark.parametrize(
    ("function", "cases"),
    [
        (number, NUMBERS),  # four digits, a whole part and no noise
        (percent, PERCENTS),
        (with_error, ERRORS),
        (lambda norm, bound: "".join(bounded(norm, bound, 3)), BOUNDS),  # over half the norm: what it is at most
        (visible, TEXTS),
        (span, SPANS),
        (times, TIMES),
    ],
    ids=["number", "percent", "with error", "bounded", "visible", "span", "times"],
)
def test_what_is_shown(function, cases):
    for *given, shown in cases:
        assert function(*given) == shown, given


def test_one_line_is_one_line_and_cut_at_the_end_asked_for():
    assert one_line("a\nb\tc") == "a↵b⇥c"
    assert (one_line("abcdef", 4), one_line("abcdef", 4, keep="end")) == ("abc…", "…def")


@pytest.mark.parametrize("digits", [3, 4, 6])
def test_what_is_said_of_a_bound_is_never_less_than_it_is(digits):
    source = random.Random(digits)
    for _ in range(500):
        norm, bound = (10 ** source.uniform(-3, 5) for _ in range(2))
        said, margin = bounded(norm, bound, digits)
        if bound > norm / 2:
            assert float(said.removeprefix("at most ").replace(",", "")) >= (norm + bound) * (1 - 1e-12)
        else:
            at_most = margin.removeprefix(" (error up to ").removesuffix(")")
            assert float(at_most.replace(",", "")) >= bound * (1 - 1e-12)
