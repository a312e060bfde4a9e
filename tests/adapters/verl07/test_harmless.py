# SPDX-License-Identifier: Apache-2.0
"""Off is unpatched verl, observing is not looking: weights, optimizer and random state, bitwise."""

import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, ONE_STEP, check_training
from tests.trainers import NONE, default_on

TWO_MINI_BATCHES = [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=2"]
FSDP1 = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
LAYOUTS = {
    "one mini-batch": [],
    "two mini-batches, two epochs": TWO_MINI_BATCHES,
    "FSDP1, two mini-batches, two epochs": FSDP1 + TWO_MINI_BATCHES,
}


@default_on(verl07=("two mini-batches, two epochs",), verl09=NONE)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_switched_off_it_is_unpatched_verl_bit_for_bit(world, unpatched_world, dump_dir, layout):
    arguments = dict(overrides=layout, dump_dir=dump_dir, num_steps=3, dropout=0.1)
    off = world.run("spikes.train", **arguments)
    unpatched = unpatched_world.run("spikes.train", **arguments)
    for ours, theirs in zip(off, unpatched, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]
        assert ours["norms"] == theirs["norms"]
        assert ours["metrics"].keys() == theirs["metrics"].keys()


OBSERVED = {"FSDP2": [], "FSDP1": [f"{ACTOR}.strategy=fsdp"], "FSDP2, one mini-batch": ONE_STEP}


@default_on(verl07=("FSDP1-auto",), verl09=NONE)
@pytest.mark.parametrize("strategy", ["auto", "bisect"])
@pytest.mark.parametrize("layout", OBSERVED)
def test_observing_a_spike_leaves_the_run_as_it_would_have_been(world, dump_dir, layout, strategy):
    spikes = 1 if OBSERVED[layout] is ONE_STEP else 2
    settings = [f"{ACTOR}.gradloc.search.strategy={strategy}"]
    given = {"layout": OBSERVED[layout], "dropout": 0.1}
    check_training(world, dump_dir, "observe", spikes=spikes, settings=settings, **given)
