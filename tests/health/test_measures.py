# SPDX-License-Identifier: Apache-2.0
"""Each measure against its definition written out over the whole history, and against chance."""

import random
from statistics import fmean, median

import pytest

from gradloc.health import measures


def values(seed, count=160):
    draw = random.Random(seed)
    return [draw.lognormvariate(0, 0.4) for _ in range(count)]


def mean_of_last(history, count=5):
    return fmean(history[-count:]) if len(history) >= count else None


def streak_of(history):
    quiet = [index for index, value in enumerate(history) if value <= 0]
    return len(history) - 1 - max(quiet, default=-1)


MEASURES = {
    "mean": (lambda: measures.Mean(5), 5, mean_of_last),
    "share": (lambda: measures.Share(1.2, 20), 20, lambda history: sum(value > 1.2 for value in history[-20:]) / 20),
    "streak": (lambda: measures.Streak(), 1, streak_of),
    "against the start": (
        lambda: measures.AgainstStart(10, 5),
        15,
        lambda history: mean_of_last(history) / median(history[:10]),
    ),
    "against the window": (
        lambda: measures.AgainstWindow(10, 5, 50),
        15,
        lambda history: mean_of_last(history) / median(history[:-5][-50:]),
    ),
}
"""Each measure, how many values it needs, and what it then says of all values so far."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_is_what_it_is_called_once_it_has_enough_values(name, seed):
    make, least, slow = MEASURES[name]
    measure, history = make(), []
    for value in values(seed):
        history.append(value - 1.2 if name == "streak" else value)
        found = measure.observe(history[-1])
        assert (found is not None) == (len(history) >= least)
        assert found is None or found.found == pytest.approx(slow(history))


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_is_the_distance_of_the_mean_from_its_best(seed):
    measure, history, means = measures.Fall(10, 5, 100), [], []
    draw = random.Random(seed)
    level = [0.2 + 0.006 * step for step in range(100)] + [0.8 - 0.02 * step for step in range(40)]
    spoken = 0
    for value in (center + draw.gauss(0, 0.02) for center in level):
        history.append(value)
        if len(history) >= 5:
            means.append(mean_of_last(history))
        found = measure.observe(value)
        if found is not None:
            spoken += 1
            best, scale = max(means), max(max(means) - min(means), abs(max(means)))
            assert found.found == pytest.approx((best - means[-1]) / scale)
            assert (found.value, found.typical) == (means[-1], best)
    assert found.found > 0.7 and spoken > 20


SCATTERS = {
    "normal around zero": lambda draw: draw.gauss(0, 0.2),
    "64 answers, 5% right": lambda draw: sum(draw.random() < 0.05 for _ in range(64)) / 64,
    "16 answers, half right": lambda draw: sum(draw.random() < 0.5 for _ in range(16)) / 16,
}


@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS.keys())
def test_a_reward_that_only_scatters_is_rarely_called_a_fall(scatter):
    draw, wrong = random.Random(0), 0
    for _ in range(30):
        measure = measures.Fall(10, 5, 100)
        readings = [measure.observe(scatter(draw)) for _ in range(300)]
        wrong += any(reading is not None and reading.found >= 0.3 for reading in readings)
    assert wrong <= 2


def test_a_reward_that_was_constant_may_wobble():
    measure = measures.Fall(10, 5, 100)
    assert all(measure.observe(1.0) is None for _ in range(50))
    assert all(measure.observe(0.98) is None for _ in range(50))
    assert [measure.observe(0.0) for _ in range(5)][-1].found > 0.9
