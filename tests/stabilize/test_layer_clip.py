# SPDX-License-Identifier: Apache-2.0
"""layer_clip as arithmetic, against its slow obvious version."""

import json
import math
import random

import pytest

from gradloc.stabilize import config
from gradloc.stabilize.layer_clip import LayerClip
from tests.stabilize import slow

LAYERS = [f"layer {number}" for number in range(4)]


def histories(num_steps, seed=0, spikes=()):
    """Log-normal norms per layer and step; ``spikes``: (step, layer, factor)."""
    rng = random.Random(seed)
    steps = [{layer: (1 + i) * math.exp(rng.gauss(0, 0.3)) for i, layer in enumerate(LAYERS)} for _ in range(num_steps)]
    for step, layer, factor in spikes:
        steps[step][LAYERS[layer]] *= factor
    return steps


SPIKES = [(12, 1, 50.0), (30, 2, 1e6), *((step, 0, 20.0) for step in range(45, 60))]


def run(clip, steps):
    return [clip.clip(norms) for norms in steps]


def close(ours, slow_ones):
    for step, (found, expected) in enumerate(zip(ours, slow_ones, strict=True)):
        assert found == pytest.approx(expected, rel=1e-12), step
        assert [factor == 1 for factor in found.values()] == [factor == 1 for factor in expected.values()], "exactly"


RULES = {
    "adagc": ({"relative_factor": 1.3, "beta": 0.9}, slow.adagc, {"factor": 1.3, "beta": 0.9}),
    "zscore": ({"window": 16, "num_deviations": 4.0}, slow.zscore, {"window": 16, "num_deviations": 4.0}),
}


@pytest.mark.parametrize("grad_clip", [1.0, 1e9], ids=["clipping warm-up", "free warm-up"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_slow_version_through_warm_up_spikes_and_a_new_level(rule, seed, grad_clip):
    given, slow_one, its = RULES[rule]
    steps = histories(80, seed, SPIKES)
    clip = LayerClip(config.LayerClipConfig(rule=rule, warmup=8, **given), grad_clip)
    close(run(clip, steps), slow_one(steps, warmup=8, grad_clip=grad_clip, **its))


@pytest.mark.parametrize("rule", ["adagc", "zscore"])
def test_a_layer_that_has_no_gradient_in_a_step_is_not_stopped_by_it(rule):
    """An expert that no token was sent to: as a running minimum, 0 would clip it to 0 for good."""
    clip = LayerClip(config.LayerClipConfig(rule=rule, warmup=3), 1e9)
    for expert in (0.0, 1.0, 1.1, 0.0, 0.9):
        factors = clip.clip({"layer 0": 1.0, "expert": expert})
        assert factors == {"layer 0": 1.0, "expert": 1.0}


@pytest.mark.parametrize("rule", ["adagc", "zscore"])
def test_a_layer_that_wakes_up_after_the_warm_up_is_bounded_by_the_global_limit(rule):
    clip = LayerClip(config.LayerClipConfig(rule=rule, warmup=2), 5.0)
    for _ in range(3):
        clip.clip({"layer 0": 1.0, "expert": 0.0})
    assert clip.clip({"layer 0": 1.0, "expert": 100.0}) == {"layer 0": 1.0, "expert": 0.05}


@pytest.mark.parametrize("rule", ["adagc", "zscore"])
def test_a_state_that_went_through_json_goes_on_bit_by_bit(rule):
    settings = config.LayerClipConfig(rule=rule, warmup=10, window=16)
    steps = histories(60, spikes=SPIKES)
    whole = LayerClip(settings, 1.0)
    answers = run(whole, steps)
    for cut in (3, 10, 13, 50):
        first, second = LayerClip(settings, 1.0), LayerClip(settings, 1.0)
        run(first, steps[:cut])
        second.load_state(json.loads(json.dumps(first.state())))
        assert run(second, steps[cut:]) == answers[cut:]
        assert second.state() == whole.state()


def test_statistics_of_another_rule_or_grouping_are_not_taken_over():
    state = LayerClip(config.LayerClipConfig(rule="adagc"), 1.0).state()
    for other in ({"rule": "zscore"}, {"rule": "adagc", "group": "kind"}):
        with pytest.raises(ValueError, match="the checkpoint's statistics are of"):
            LayerClip(config.LayerClipConfig(**other), 1.0).load_state(state)
