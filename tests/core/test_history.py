# SPDX-License-Identifier: Apache-2.0
"""The history of norms that the health rules and the clipping by layer keep."""

import math
import random

import pytest

from gradloc.core.history import History
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
    two.load_state(one.state())
    assert two.threshold() == one.threshold() and two.summary() == one.summary()
