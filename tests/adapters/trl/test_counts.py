# SPDX-License-Identifier: Apache-2.0
"""A healthy step asks little more of the device than TRL's own does."""

from tests.world.spikes import ON

TAU = "actor_rollout_ref.actor.grad_norm_threshold=640"


def test_a_healthy_step_reads_twice_and_adds_no_collective(world, tmp_path):
    count = "tests.adapters.trl.counts.counted"
    plain = world.run(count, overrides=[], dump_dir=str(tmp_path / "plain"))
    watched = world.run(count, overrides=[*ON, TAU], dump_dir=str(tmp_path / "watched"))
    for without, with_it in zip(plain, watched, strict=True):
        print(without, with_it)
        assert with_it["spikes"] == 0
        assert with_it["reads"] <= without["reads"] + 2, "how the norm grew, and the coefficients of a token"
        assert with_it["collectives"] == without["collectives"]
        assert with_it["ops"] < 1.06 * without["ops"]
