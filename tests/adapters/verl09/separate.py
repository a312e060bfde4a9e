# SPDX-License-Identifier: Apache-2.0
"""Analyses of the training batch, and of one of their own, on verl 0.9's trainer without Ray; runs inside a rank."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transfer_queue import KVBatchMeta

from gradloc.adapters.verl09.trainer import _ACTOR, QueueUpdate
from tests.world.harness import make_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from .harness import make_trainer


def analyse(overrides: list[str], model_dir: str) -> dict[str, Any]:
    """A step's analysis of the training batch, whose last two rows fill it up; its record."""
    made = make_trainer(overrides, model_dir)
    made.trainer.global_steps = 1
    with made.store:
        meta = made.store.add(make_batch())
        for tag in meta.tags[-2:]:
            tag["is_padding"] = True
        made.trainer._update_actor(meta, {})
    root = Path(made.trainer.gradloc.analysis.buckets.training.root)
    return json.loads((root / "gradient_analysis" / "step_1.json").read_text())


def prepare(overrides: list[str], model_dir: str, failing: bool) -> dict[str, Any]:
    """Run a step's analysis up to the workers; report what the trainer's twin saw and what stays in the queue.

    Args:
        overrides: of verl's config.
        model_dir: what `save_model` wrote.
        failing: the step fails once the rollouts are in the queue.
    """
    made = make_trainer(overrides, model_dir)
    trainer, analysis, buffer = made.trainer, made.trainer.gradloc.analysis, made.trainer.replay_buffer
    seen: list[dict[str, Any]] = []
    trainer.train_dataset = list(range(100, 200))
    trainer.train_dataloader = SimpleNamespace(collate_fn=lambda items: {"raw_prompt": items})
    trainer.train_dataloader_it = "training's"
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: seen.append({"weights": step}))
    trainer.global_steps, trainer.curr_step_profile = 7, True

    def meta(keys: list[str]) -> Any:
        return KVBatchMeta(keys=keys, partition_id="train", tags=[{} for _ in keys])

    def step(twin: Any, metrics: Any, _: Any) -> None:
        """As much of the trainer's step as the twin relies on."""
        prompts = twin._next_train_batch()
        seen.append(
            {
                "step": twin.global_steps,
                "prompts": list(prompts["raw_prompt"]),
                "rollouts": prompts["__rollout_n__"].tolist(),
                "n": twin.config.actor_rollout_ref.rollout.n,
                "filters": twin.config.algorithm.filter_groups,
                "has_own_buffer": twin.replay_buffer is not buffer,
                "profiles": twin.curr_step_profile,
            }
        )
        own = dict(zip(prompts["uid"], map(dict, made.store.rows.values()), strict=False))
        made.store.rows |= own
        analysis.counts = {"kept_ratio": 0.5}  # as the filter of rollouts leaves it
        if failing:
            raise RuntimeError("no rollouts")
        twin._update_actor(meta(list(own)), metrics)

    sums: list[float] = []
    analysis.buckets.analyse = lambda *_: sums.extend(analysis._separate(5).tensors["advantages"].sum(1).tolist()) or {}
    metrics: dict[str, Any] = {}
    batch = make_batch()
    batch.batch["rm_scores"] = torch.rand_like(batch.batch["advantages"])
    with made.store, mock.patch.object(PPOTrainer, "step", step):
        training = meta(made.store.add(batch).keys)
        analysis.run(QueueUpdate(trainer, _ACTOR, training), metrics, {})
    return {
        "seen": seen,
        "sums": sums,
        "training": batch.batch["advantages"].sum(1).tolist(),
        "failures": metrics["grad_analysis/failures"],
        "is_queue_same": list(made.store.rows) == training.keys,
        "is_trainer_same": trainer.train_dataloader_it == "training's" and trainer.replay_buffer is buffer,
        "n": trainer.config.actor_rollout_ref.rollout.n,
    }
