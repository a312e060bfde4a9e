# SPDX-License-Identifier: Apache-2.0
"""Off is unpatched verl, observing is not looking: weights, optimizer and random state, bitwise."""

import pytest

ON = [
    "actor_rollout_ref.actor.spike_detection=True",
    "actor_rollout_ref.actor.grad_norm_threshold=640",
]
TWO_MINI_BATCHES = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_epochs=2",
]
FSDP1 = ["actor_rollout_ref.actor.strategy=fsdp"]
LAYOUTS = {
    "one mini-batch": [],
    "two mini-batches, two epochs": TWO_MINI_BATCHES,
    "FSDP1, two mini-batches, two epochs": FSDP1 + TWO_MINI_BATCHES,
}
STRATEGIES = ["auto", "bisect", "sketch"]


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_observing_a_spike_leaves_the_run_as_it_would_have_been(world, dump_dir, layout, strategy):
    search = [f"actor_rollout_ref.actor.gradloc.search.strategy={strategy}"]
    arguments = dict(dump_dir=dump_dir, num_steps=3, dropout=0.1, spike_at=2)
    off = world.run("spikes.train", overrides=layout, **arguments)
    on = world.run("spikes.train", overrides=ON + search + layout, **arguments)
    assert on[0]["events"] == 1
    for ours, theirs in zip(on, off, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]
        assert ours["norms"] == theirs["norms"]
