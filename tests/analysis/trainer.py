# SPDX-License-Identifier: Apache-2.0
"""The analyses' and the filter's part of a trainer step, on every rank alike: verl's trainer as far as it is asked.

Runs inside a rank of a world. Each rank is its own driver; only the workers' part is shared.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.world.harness import answer_of, asked, make_batch, make_trainer


class Workers:
    """Stands where the actor's worker group stands: deals out the rows, asks this rank's actor."""

    def __init__(self, actor: Any):
        self.worker = SimpleNamespace(actor=actor, actor_lr_scheduler=None)

    def update_actor(self, data: Any) -> Any:
        return answer_of(data, self.worker.actor.update_policy(data.chunk(dist.get_world_size())[dist.get_rank()]))

    def execute_with_func_generator(self, ask: Callable) -> Any:
        return asked(self.worker, ask)


class Wandb:
    """As much of wandb's module as verl's ``Tracking`` keeps and the group table needs."""

    run = object()

    def __init__(self):
        self.logged: list[tuple] = []

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple:
        return columns, data

    def log(self, tables: dict[str, Any], step: int, commit: bool) -> None:
        self.logged.append((tables, step, commit))


class StandIn:
    """Stand in for verl's trainer as far as the analyses and the filter touch it."""

    use_critic = False

    def __init__(self, overrides: list[str], dump_dir: str):
        from gradloc.adapters.verl07.trainer import RayTrainerAnalyses, TrainerHook
        from gradloc.adapters.verl_common.requirements import analyses_in

        made = make_trainer(overrides, dump_dir)
        self.config = made.config
        self.train_dataset = range(100)
        self.actor_rollout_wg = Workers(made.actor)
        self.global_steps = 1
        self.num_balanced = 0
        self.seen: list[dict[str, Any]] = []
        analyses = analyses_in(self.config)
        self.analysis = None if analyses is None else RayTrainerAnalyses(self.config, dump_dir, analyses)
        self.gradloc = TrainerHook()
        self.gradloc.analysis = self.analysis
        self.wandb = Wandb()
        self.gradloc.begin_fit(SimpleNamespace(logger={"wandb": self.wandb}))

    def _get_dp_size(self, group: Any, role: str) -> int:
        return dist.get_world_size()

    def _balance_batch(self, batch: Any, metrics: dict) -> None:
        self.num_balanced += 1
        batch.reorder(torch.arange(len(batch)).flip(0))

    def fit(self) -> None:
        """As much of verl's as the twin that prepares a separate batch relies on."""
        self._load_checkpoint()
        epoch = self.global_steps // len(self.train_dataloader)
        self.global_steps += 1
        config = self.config
        self.seen.append(
            {
                "step": self.global_steps,
                "n": config.actor_rollout_ref.rollout.n,
                "logger": list(config.trainer.logger),
                "validates": self.val_reward_fn is not None,
                "epochs_left": config.trainer.total_epochs - epoch,
            }
        )
        for batch in self.train_dataloader:
            self.gradloc.analyze(self, batch, {}, {})
            raise AssertionError("the twin went on to learn")


def scored_batch(rewards: list[float], per_group: int) -> Any:
    """A batch whose groups have these rewards, in the order in which they were rolled out."""
    batch = make_batch(len(rewards))
    batch.batch["token_level_scores"] = torch.zeros_like(batch.batch["token_level_scores"])
    batch.batch["token_level_scores"][:, 0] = torch.tensor(rewards, dtype=torch.float32)
    uids = [f"prompt-{row // per_group}" for row in range(len(rewards))]
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    return batch


def analyse(
    kind: str, dump_dir: str, rewards: list[float], per_group: int, overrides: list[str], has_advantages: bool
) -> dict[str, Any]:
    """One analysis of the training batch: its metrics, its files, and what it did to the batch."""
    trainer = StandIn([f"trainer.{kind}_analysis_mode=True", *overrides], f"{dump_dir}-{dist.get_rank()}")
    batch = scored_batch(rewards, per_group)
    batch.batch["advantages"] *= has_advantages
    before = {key: value.clone() for key, value in batch.batch.items()}
    metrics, timing = {}, {}
    ends = trainer.gradloc.analyze(trainer, batch, metrics, timing)
    analysis = trainer.analysis.buckets or trainer.analysis.quartiles
    folder = Path(analysis.training.root) / f"{kind}_analysis"
    return {
        "ends": ends,
        "metrics": metrics,
        "timing": timing,
        "files": sorted(path.name for path in folder.iterdir()),
        "record": json.loads((folder / "step_1.json").read_text()),
        "tables": [name for tables, *_ in trainer.wandb.logged for name in tables],
        "vital": [error.__name__ for error in analysis.training.vital],
        "batch_is_same": list(before) == list(batch.batch.keys())
        and all(torch.equal(before[key].nan_to_num(), batch.batch[key].nan_to_num()) for key in before),
        "old_log_probs": batch.batch["old_log_probs"].tolist(),
        "response_mask": batch.batch["response_mask"].tolist(),
    }


def filter_rows(rewards: list[float], per_group: int, dump_dir: str, overrides: list[str]) -> dict[str, Any]:
    """The rollout filter as fit() calls it, then the advantages as the update sees them."""
    trainer = StandIn(overrides, f"{dump_dir}-{dist.get_rank()}")
    batch = scored_batch(rewards, per_group)
    scores = batch.batch.pop("token_level_scores")
    batch.non_tensor_batch["row"] = np.arange(len(rewards))
    ids, metrics = batch.batch["input_ids"].clone(), {}
    extras = {"acc": [float(reward) for reward in rewards]}
    kept, kept_scores, kept_extras = trainer.gradloc.filter(trainer, batch, scores, extras, metrics)
    rows = kept.non_tensor_batch["row"].tolist()
    before = kept.batch["advantages"].clone()
    trainer.gradloc.analyze(trainer, kept, {}, {})
    return {
        "rows": rows,
        "rewards": kept_scores.sum(-1).tolist(),
        "extras": kept_extras["acc"],
        "is_in_step": bool(torch.equal(kept.batch["input_ids"], ids[rows])),
        "has_scores": "token_level_scores" in kept.batch.keys(),
        "tokens": kept.meta_info.get("global_token_num"),
        "expected_tokens": kept.batch["attention_mask"].sum(-1).tolist(),
        "metrics": metrics,
        "scale": float(kept.batch["advantages"].sum() / before.sum()),
        "balanced": trainer.num_balanced,
    }


def prepare_separate(dump_dir: str) -> dict[str, Any]:
    """verl's loop on a twin: what the twin sees, and what the trainer looks like afterwards."""
    own = [f"trainer.{key}" for key in ("gradient_analysis_mode=True", "gradient_analysis_env_groups=4")]
    trainer = StandIn([*own, "trainer.n_gpus_per_node=1"], dump_dir)
    trainer.train_dataset = list(range(100, 200))
    trainer.train_dataloader = SimpleNamespace(collate_fn=list)
    trainer.val_reward_fn = len
    trainer.global_steps = 7
    loader = trainer.train_dataloader
    batches = [trainer.analysis.prepare(trainer, 4, 3, seed) for seed in (5, 5, 6)]
    return {
        "batches": batches,
        "seen": trainer.seen[0],
        "n": trainer.config.actor_rollout_ref.rollout.n,
        "logger": list(trainer.config.trainer.logger),
        "steps": trainer.global_steps,
        "is_loader_same": trainer.train_dataloader is loader,
    }
