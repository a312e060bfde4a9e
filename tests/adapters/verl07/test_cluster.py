# SPDX-License-Identifier: Apache-2.0
"""A cluster, where every process has its own disk and its own working folder."""

import json
import os
from pathlib import Path

import pytest

from tests.world.harness import VOCABULARY

ON = ["actor_rollout_ref.actor.spike_detection=True", "actor_rollout_ref.actor.grad_norm_threshold=640"]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_weights_of_an_event_are_a_checkpoint_of_verls_or_on_no_disk_at_all(world, tmp_path, strategy):
    kept = world.run("cluster.keep_weights", strategy=strategy, folder=str(tmp_path / "kept"), full_rank=None)
    assert [(found["is_moved"], found["is_back"]) for found in kept] == [(True, True)] * 2
    assert kept[0]["shards"] == [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    model, sharding = (
        json.loads(Path(kept[0]["folder"], name).read_text())
        for name in ("huggingface/config.json", "fsdp_config.json")
    )
    assert (model["model_type"], model["vocab_size"], sharding["world_size"]) == ("qwen3", VOCABULARY, 2), (
        "what verl's merger reads"
    )
    full = world.run("cluster.keep_weights", strategy=strategy, folder=str(tmp_path / "full"), full_rank=1)
    assert full == [{"folder": None, "shards": []}] * 2


def test_a_trainer_that_sends_no_policy_is_told_once_what_to_do(world, dump_dir):
    first, second = world.run("cluster.update_without_policy", overrides=ON, dump_dir=dump_dir)
    (line,) = first["lines"]
    assert "self._update_actor(batch)" in line
    assert second["lines"] == []
    assert first["count"] == second["count"] == [2]


@pytest.mark.parametrize("overrides, said", [(ON, "has not called verl.utils.gradloc_seam.build"), ([], "")])
def test_a_trainer_that_never_builds_its_hook_is_told_by_the_workers(world, dump_dir, overrides, said):
    for found in world.run("cluster.build_without_trainer", overrides=overrides, dump_dir=dump_dir):
        assert found["kind"] == "Off" and said in found["said"] and bool(said) == bool(found["said"])


def test_a_relative_folder_for_events_is_made_absolute_before_any_worker_hears_of_it(world, tmp_path):
    folders = world.run("cluster.resolve_relative", overrides=ON, folder=str(tmp_path))
    assert folders == [os.path.join(tmp_path, "some", "events")] * 2
