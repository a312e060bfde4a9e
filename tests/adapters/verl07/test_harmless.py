# SPDX-License-Identifier: Apache-2.0
"""Off is unpatched verl, observing is not looking: weights, optimizer and random state, bitwise."""

import functools

import pytest

ON = ["actor_rollout_ref.actor.spike_detection=True", "actor_rollout_ref.actor.grad_norm_threshold=640"]
TWO_MINI_BATCHES = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_epochs=2"]
FSDP1 = ["actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
LAYOUTS = {
    "one mini-batch": [],
    "two mini-batches, two epochs": TWO_MINI_BATCHES,
    "FSDP1, two mini-batches, two epochs": FSDP1 + TWO_MINI_BATCHES,
}


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


SPIKING = dict(num_steps=3, dropout=0.1, spike_at=2)


@pytest.fixture(scope="module")
def unobserved(world, tmp_path_factory):
    """``unobserved(layout)``: the run in which nobody looks, made once."""
    given = {"dump_dir": str(tmp_path_factory.mktemp("unobserved")), **SPIKING}
    return functools.cache(lambda layout: world.run("spikes.train", overrides=LAYOUTS[layout], **given))


@pytest.mark.parametrize("strategy", ["auto", "bisect", "sketch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_observing_a_spike_leaves_the_run_as_it_would_have_been(world, unobserved, dump_dir, layout, strategy):
    search = [f"actor_rollout_ref.actor.gradloc.search.strategy={strategy}"]
    off = unobserved(layout)
    on = world.run("spikes.train", overrides=ON + search + LAYOUTS[layout], dump_dir=dump_dir, **SPIKING)
    assert on[0]["events"] == 1
    for ours, theirs in zip(on, off, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["rng"] == theirs["rng"]
        assert ours["norms"] == theirs["norms"]
