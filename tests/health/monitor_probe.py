# SPDX-License-Identifier: Apache-2.0
"""The monitor in verl's trainer; runs in a rank, where verl is importable."""

import json
import os
import tempfile
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from gradloc.adapters.verl07.trainer import TrainerHook, clip_limit
from gradloc.adapters.verl_common.trainer import build_monitor
from gradloc.health import HealthConfig
from gradloc.health.monitor import Monitor
from tests.health.test_monitor import TWO, batch_of
from verl import DataProto


def config_of(**changes):
    """The parts of a trainer's config that the monitor reads."""
    made = {
        "trainer.health.enable": True,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor": {"strategy": "fsdp2", "grad_clip": 1.0, "optim": {"clip_grad": 0.7}},
        **changes,
    }
    config = OmegaConf.create()
    for key, value in made.items():
        OmegaConf.update(config, key, value)
    return config


def clip_and_comparing(**changes):
    """What the monitor takes from a config."""
    config = config_of(**changes)
    monitor = build_monitor(config, clip_limit(config))
    clips = [active.measure._limit for active in monitor._judge._active if active.rule.name == "clip_share"]
    return [clips[0] if clips else None, monitor._compares_rollouts]


def checkpointed(folder):
    """The last judged step in a checkpoint, which verl saves before the step has its metrics."""
    hook = TrainerHook()
    hook.monitor = Monitor(HealthConfig(enable=True), 1.0)
    batch = batch_of(TWO)
    batch = DataProto.from_dict(batch.tensors, {"uid": np.array(batch.labels["uid"], dtype=object)})
    kept = []
    for step in range(1, 5):
        if step == 3:
            hook.save(folder)
        hook.after_step(batch, {"actor/grad_norm": 0.5}, step)
    with open(f"{folder}/gradloc.json") as file:
        kept.append(json.load(file)["health"]["judge"]["last_step"])
    resumed = TrainerHook()
    resumed.monitor = Monitor(HealthConfig(enable=True), 1.0)
    resumed.load(folder)
    kept.append(resumed.monitor.state()["judge"]["last_step"])
    return kept + [os.listdir(folder)]


def answer() -> dict[str, Any]:
    """Everything that the tests ask."""
    return {
        "checkpointed": checkpointed(tempfile.mkdtemp()),
        "fsdp": clip_and_comparing(),
        "megatron": clip_and_comparing(**{"actor_rollout_ref.actor.strategy": "megatron"}),
        "engine": clip_and_comparing(**{"trainer.use_legacy_worker_impl": "disable"}),
        "layers": clip_and_comparing(**{"actor_rollout_ref.actor.gradloc.stabilize.layer_clip.rule": "adagc"}),
        "unclipped": clip_and_comparing(**{"actor_rollout_ref.actor.grad_clip": None}),
        "gae": clip_and_comparing(**{"algorithm.adv_estimator": "gae"}),
        "off": [
            build_monitor(config_of(**{"trainer.health.enable": False}), 1.0) is None,
            build_monitor(config_of(**{"trainer.health": None}), 1.0) is None,
        ],
    }
