# SPDX-License-Identifier: Apache-2.0
"""The history of norms that the health rules and the clipping by layer keep."""

import math
import random

import pytest

from gradloc.core.history import History, ScaleHistory, excess
from gradloc.core.trigger import spike_kind


def fires(norms, **settings):
    history = History(**{"window": 64, "warmup": 16, "num_deviations": 6.0, **settings})
    fired = []
    for step, norm in enumerate(norms):
        kind = spike_kind(norm, history.threshold(), "adaptive")
        if kind:
            fired.append(step)
        history.observe(norm, kind is not None)
    return fired


def healthy(seed, steps=400, level=lambda step: 0.8):
    rng = random.Random(seed)
    return [level(step) * math.exp(rng.gauss(0, 0.25)) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_history_never_fires(seed):
    assert fires(healthy(seed)) == []


@pytest.mark.parametrize("seed", range(5))
def test_one_spike_fires_once_and_leaves_the_threshold_alone(seed):
    norms = healthy(seed)
    norms[200] = 111.0
    norms[300] = 54_648_652.0
    assert fires(norms) == [200, 300]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_drift_over_two_orders_of_magnitude_never_fires(seed):
    assert fires(healthy(seed, level=lambda step: 0.1 * 100 ** (step / 400))) == []


def test_a_new_level_is_learned_after_a_few_steps():
    norms = healthy(0, 100) + [50 * norm for norm in healthy(1, 300)]
    fired = fires(norms)
    assert fired == list(range(100, 108))


def test_nothing_but_non_finite_fires_before_the_warm_up_is_over():
    norms = [0.5, 900.0, float("nan"), 0.6, float("inf")] + healthy(0, 20)
    assert fires(norms) == [2, 4]


def test_a_history_comes_back_from_a_checkpoint_exactly():
    norms = healthy(3, 90)
    one = History(64, 16, 6.0)
    for norm in norms:
        one.observe(norm, False)
    two = History(64, 16, 6.0)
    for norm in (1e3, 1e4, 1e5):
        two.observe(norm, False)
    two.load_state(one.state())
    assert two.threshold() == one.threshold() and two.summary() == one.summary()


def test_norms_that_are_nearly_equal_scatter_by_a_twentieth():
    history = History(64, 16, 6.0)
    for _ in range(16):
        assert history.threshold() is None
        history.observe(2.0, False)
    assert history.summary() == {"num_norms": 16, "median_norm": pytest.approx(2.0), "log_sigma": 0.05}
    assert history.threshold() == pytest.approx(2.0 * math.exp(6 * 0.05))


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


@pytest.mark.parametrize(
    ("value", "typical", "found"),
    [(6.0, (2.0, 3.0), 3.0), (5.9, (2.0, 3.0), None), (6.0, (0.0, 3.0), None), (600.0, (2.0, 3.0), 300.0)],
)
def test_a_value_is_told_as_a_multiple_of_what_is_typical_where_it_is_unusual(value, typical, found):
    assert excess(value, typical) == found
