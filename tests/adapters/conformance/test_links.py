# SPDX-License-Identifier: Apache-2.0
"""The last update is undone while a spike is looked into, and the run goes on as if nobody had looked."""

import pytest

from tests.trainers import default_on

ACTOR = "actor_rollout_ref.actor"


@default_on(verl07=("default", "fsdp1"), verl09=("default",))
@pytest.mark.parametrize("layout", [[], [f"{ACTOR}.strategy=fsdp"]], ids=["default", "fsdp1"])
def test_a_run_whose_update_was_undone_goes_on_bit_for_bit(world, dump_dir, layout):
    settings = [f"{ACTOR}.grad_norm_threshold=40"]
    found = world.run("actions.train_past_a_large_update", overrides=settings, dump_dir=dump_dir, layout=layout)
    assert all(rank["is_same"] for rank in found), "weights, moments, random numbers and norms"
    assert found[0]["faults"], found[0]["norms"]
    number, fault = found[0]["faults"][0]
    assert (number, fault["at"], fault["step"]) == (3, "last_update", 2), (fault, found[0]["norms"])
    assert fault["evidence"]["norm_without_update"] < fault["evidence"]["norm"] / 2
