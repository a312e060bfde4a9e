# SPDX-License-Identifier: Apache-2.0
"""The reporter's part of a trainer step, on every rank alike: verl's trainer as far as it is asked.

Runs inside a rank of a world. Each rank is its own driver; only the workers' part is shared.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.world.harness import make_batch, make_trainer

ON = ["trainer.gradient_analysis_mode=True"]


class Workers:
    """Stands where the actor's worker group stands: deals out the rows, asks this rank's actor."""

    def __init__(self, actor: Any, error: Exception | None = None):
        self.actor = actor
        self.error = error
        self.num_asked = 0

    def analyze_gradients(self, data: Any) -> Any:
        from verl import DataProto
        from verl.gradloc.adapters.verl07.analysis_actor import RECORD_KEY, analyze

        self.num_asked += 1
        if self.error is not None:
            raise self.error
        record = analyze(self.actor, data.chunk(dist.get_world_size())[dist.get_rank()])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, record)
        return DataProto(meta_info={"metrics": {RECORD_KEY: everyone}})


class Wandb:
    """As much of wandb's module as verl's ``Tracking`` keeps and the group table needs."""

    run = object()

    def __init__(self):
        self.tables: list[str] = []

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple:
        return columns, data

    def log(self, tables: dict[str, Any], step: int, commit: bool) -> None:
        self.tables += tables


class StandIn:
    """What the reporter touches of verl's trainer."""

    use_critic = False

    def __init__(self, overrides: list[str], dump_dir: str, error: Exception | None = None):
        from verl.gradloc.adapters.verl07.analysis_trainer import build_analysis
        from verl.gradloc.adapters.verl07.trainer import TrainerHook

        made = make_trainer(overrides, dump_dir)
        self.config = made.config
        self.train_dataset = range(100)
        self.actor_rollout_wg = Workers(made.actor, error)
        self.global_steps = 1
        self.num_balanced = 0
        self.analysis = build_analysis(self)
        self.gradloc = TrainerHook(analysis=self.analysis)
        self.wandb = Wandb()
        self.gradloc.begin_fit(SimpleNamespace(logger={"wandb": self.wandb}))

    def _get_dp_size(self, group: Any, role: str) -> int:
        return dist.get_world_size()

    def _balance_batch(self, batch: Any, metrics: dict) -> None:
        self.num_balanced += 1
        batch.reorder(torch.arange(len(batch)).flip(0))


def scored_batch(rewards: list[float], per_group: int) -> Any:
    """A batch whose groups have these rewards, in the order in which they were rolled out."""
    batch = make_batch(len(rewards))
    batch.batch["token_level_scores"] = torch.zeros_like(batch.batch["token_level_scores"])
    batch.batch["token_level_scores"][:, 0] = torch.tensor(rewards, dtype=torch.float32)
    uids = [f"prompt-{row // per_group}" for row in range(len(rewards))]
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    return batch


def analyse(rewards: list[float], per_group: int, dump_dir: str, overrides: list[str] = ()) -> dict[str, Any]:
    """One analysis of the training batch: its metrics, its files, and what it did to the batch."""
    trainer = StandIn([*ON, *overrides], f"{dump_dir}-{dist.get_rank()}")
    batch = scored_batch(rewards, per_group)
    before = {key: value.clone() for key, value in batch.batch.items()}
    metrics, timing = {}, {}
    ends = trainer.analysis.run(trainer, batch, metrics, timing)
    folder = Path(trainer.analysis.buckets.about.root) / "gradient_analysis"
    record = json.loads((folder / "step_1.json").read_text())
    return {
        "ends": ends,
        "metrics": metrics,
        "timing": timing,
        "files": sorted(path.name for path in folder.iterdir()),
        "record": record,
        "tables": trainer.wandb.tables,
        "batch_is_same": list(before) == list(batch.batch.keys())
        and all(torch.equal(before[key], batch.batch[key]) for key in before),
    }


def run_at_steps(dump_dir: str, overrides: list[str], steps: list[int]) -> list[int]:
    """At which of these steps the workers were asked."""
    trainer = StandIn(overrides, f"{dump_dir}-{dist.get_rank()}")
    asked = []
    for step in steps:
        trainer.global_steps = step
        before = trainer.actor_rollout_wg.num_asked
        trainer.analysis.run(trainer, scored_batch([0.0, 1.0] * 8, 2), {}, {})
        if trainer.actor_rollout_wg.num_asked > before:
            asked.append(step)
    return asked


def is_built(dump_dir: str, overrides: list[str]) -> bool:
    return StandIn(overrides, dump_dir).analysis is not None


def fail_again_and_again(dump_dir: str) -> dict[str, Any]:
    """The trainer's side of the analysis fails at every step."""
    overrides = [*ON, "trainer.gradient_analysis_every=1"]
    trainer = StandIn(overrides, dump_dir, RuntimeError("no analysis today"))
    counted, ends = [], []
    for step in range(1, 6):
        trainer.global_steps = step
        metrics = {}
        ends.append(trainer.analysis.run(trainer, scored_batch([0.0, 1.0] * 8, 2), metrics, {}))
        counted.append(metrics.get("grad_analysis/failures"))
    return {"counted": counted, "ends": ends, "asked": trainer.actor_rollout_wg.num_asked}


def fail_for_good(dump_dir: str, overrides: list[str], is_of_ray: bool) -> str:
    """A failure that must not be swallowed; what came through."""
    from ray.exceptions import RayActorError

    error = RayActorError() if is_of_ray else RuntimeError("no analysis today")
    trainer = StandIn([*ON, *overrides], dump_dir, error)
    try:
        trainer.analysis.run(trainer, scored_batch([0.0, 1.0] * 8, 2), {}, {})
    except Exception as raised:
        return type(raised).__name__
    return "nothing"


def filter_rows(rewards: list[float], per_group: int, dump_dir: str, overrides: list[str]) -> dict[str, Any]:
    """The rollout filter as fit() calls it, then the advantages as the update sees them."""
    trainer = StandIn(overrides, f"{dump_dir}-{dist.get_rank()}")
    batch = scored_batch(rewards, per_group)
    scores = batch.batch.pop("token_level_scores")
    batch.non_tensor_batch["row"] = np.arange(len(rewards))
    ids, metrics = batch.batch["input_ids"].clone(), {}
    extras = {"acc": [float(reward) for reward in rewards]}
    kept, kept_scores, kept_extras = trainer.analysis.filter(trainer, batch, scores, extras, metrics)
    rows = kept.non_tensor_batch["row"].tolist()
    before = kept.batch["advantages"].clone()
    trainer.analysis.run(trainer, kept, {}, {})
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
    from verl.gradloc.adapters.verl07.analysis_trainer import prepare_batch

    trainer = StandIn([*ON, "trainer.gradient_analysis_env_groups=4", "trainer.n_gpus_per_node=1"], dump_dir)
    trainer.train_dataset = list(range(100, 200))
    trainer.train_dataloader = _Loader()
    trainer.val_reward_fn = len
    trainer.global_steps = 7
    trainer.metrics_of_twin = None
    seen = []

    class Fitting:
        """Bound to whoever it is called on, like verl's own method."""

        def __get__(self, owner, _):
            return lambda: _fit(owner, seen)

    type(trainer).fit = Fitting()
    batches = [prepare_batch(trainer, 4, 3, seed) for seed in (5, 5, 6)]
    return {
        "batches": batches,
        "seen": seen[0],
        "n": trainer.config.actor_rollout_ref.rollout.n,
        "logger": list(trainer.config.trainer.logger),
        "steps": trainer.global_steps,
        "is_loader_same": isinstance(trainer.train_dataloader, _Loader),
    }


class _Loader:
    collate_fn = staticmethod(lambda items: list(items))


def _fit(owner: Any, seen: list) -> None:
    """As much of verl's fit() as the twin relies on."""
    owner._load_checkpoint()
    epoch = owner.global_steps // len(owner.train_dataloader)
    owner.global_steps += 1
    seen.append(
        {
            "step": owner.global_steps,
            "n": owner.config.actor_rollout_ref.rollout.n,
            "logger": list(owner.config.trainer.logger),
            "validates": owner.val_reward_fn is not None,
            "epochs_left": owner.config.trainer.total_epochs - epoch,
        }
    )
    for batch in owner.train_dataloader:
        owner.gradloc.analyze(owner, batch, {}, {})
        raise AssertionError("the twin went on to learn")
