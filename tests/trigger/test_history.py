# SPDX-License-Identifier: Apache-2.0
"""The history of norms that the health rules and the clipping by layer keep, whose tests hold what it flags."""

import math
import random
from statistics import median

import pytest

from gradloc.record import History
from gradloc.trigger.history import NormHistory, Recent, ScaleHistory, middle


@pytest.mark.parametrize("maxlen", [1, 2, 7, 8])
def test_recent_numbers_have_the_median_and_the_deviation_of_the_last_ones(maxlen):
    rng, recent, seen = random.Random(maxlen), Recent(maxlen), []
    for _ in range(200):
        seen.append(rng.choice([rng.gauss(0, 1), rng.choice(seen or [0.0]), 1e9]))
        recent.append(seen[-1])
        last = seen[-maxlen:]
        assert list(recent) == last and middle(recent.ordered) == median(last)
        for center in (median(last), -3.0, rng.gauss(0, 1)):
            assert recent.median_distance(center) == median(abs(value - center) for value in last)


def test_a_step_without_a_finite_gradient_says_nothing_and_norms_of_all_sizes_have_no_threshold():
    history = NormHistory(64, 4, 6.0)
    for norm in (0.0, -1.0, math.nan, math.inf):
        history.observe(norm, False)
    assert history.summary() == History()
    for norm in (1e-300, 1e300, 1e-300, 1e300):
        history.observe(norm, False)
    assert history.threshold() == math.inf
    short, taken_over = NormHistory(64, 4, 6.0), NormHistory(64, 4, 6.0)
    short.observe(5e3, False)
    for state in (history.state(), short.state()):
        taken_over.load_state(state)
    assert taken_over.state() == short.state(), "nothing of its own is left"


def test_what_is_usual_is_three_times_the_median_or_four_deviations():
    history = ScaleHistory()
    for value in (1.0, 2.0, 4.0):
        history.observe({"kl": value, "coefficient": 5.0})
    assert history.typical() == {}, "of four steps on"
    history.observe({"kl": 8.0, "coefficient": 5.0, "nothing": 0.0, "odd": math.nan})
    center, usual = history.typical()["kl"]
    assert center == pytest.approx(2.0) and usual == pytest.approx(2.0 ** (4 * 1.4826))
    assert history.typical()["coefficient"] == (pytest.approx(5.0), 3.0)
    assert history.typical().keys() == {"kl", "coefficient"}
    for number in range(8):
        history.observe({"kl": 10.0 ** (300 * (-1) ** number)})
    assert history.typical()["kl"][1] == math.exp(709.0), "and not more than a number can be"


def test_a_checkpoint_brings_back_what_is_usual_and_no_more_than_a_window_of_it():
    one, two = ScaleHistory(window=6), ScaleHistory(window=6)
    for value in (1.0, 1.2, 0.9, 1.1, 2.0, 0.8):
        one.observe({"advantage": value})
    two.load_state(one.state())
    for history in (one, two):
        history.observe({"advantage": 3.0})
    assert two.state() == one.state() == {"advantage": [1.2, 0.9, 1.1, 2.0, 0.8, 3.0]}
