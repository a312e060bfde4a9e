# SPDX-License-Identifier: Apache-2.0
"""The reporter's part of a trainer step, on every rank alike."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.analysis.trainer import StandIn
from tests.world.harness import make_batch

ON = ["trainer.quartile_analysis_mode=True"]


def analyse(
    dump_dir: str,
    overrides: list[str] = (),
    num_rows: int = 16,
    num_advantages: int | None = None,
    bad_log_prob: bool = False,
) -> dict[str, Any]:
    """One analysis of the training batch: its metrics, its file, and what it did to the batch."""
    trainer = StandIn([*ON, *overrides], f"{dump_dir}-{dist.get_rank()}")
    batch = make_batch(num_rows)
    if num_advantages is not None:
        batch.batch["advantages"][num_advantages:] = 0
    if bad_log_prob:
        batch.batch["old_log_probs"][3, 0] = float("nan")
    before = {key: value.clone() for key, value in batch.batch.items()}
    metrics, timing = {}, {}
    ends = trainer.analysis.run(trainer, batch, metrics, timing)
    folder = Path(trainer.analysis.quartiles.about.root) / "quartile_analysis"
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {
        "ends": ends,
        "metrics": metrics,
        "timing": timing,
        "files": files,
        "record": json.loads((folder / "step_1.json").read_text()) if files else None,
        "batch_is_same": list(before) == list(batch.batch.keys())
        and all(torch.equal(before[key].nan_to_num(), batch.batch[key].nan_to_num()) for key in before),
        "old_log_probs": batch.batch["old_log_probs"].tolist(),
        "response_mask": batch.batch["response_mask"].tolist(),
    }


def run_at_steps(dump_dir: str, overrides: list[str], steps: list[int]) -> list[int]:
    """At which of these steps the workers were asked."""
    few = "trainer.quartile_analysis_num_tokens=0"
    large = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"
    trainer = StandIn([*ON, few, large, *overrides], dump_dir)
    asked = []
    for step in steps:
        trainer.global_steps = step
        before = trainer.actor_rollout_wg.num_asked
        trainer.analysis.run(trainer, make_batch(), {}, {})
        if trainer.actor_rollout_wg.num_asked > before:
            asked.append(step)
    return asked


def fail_again_and_again(dump_dir: str) -> dict[str, Any]:
    """The workers fail at every step."""
    overrides = [*ON, "trainer.quartile_analysis_every=1"]
    trainer = StandIn(overrides, dump_dir, RuntimeError("no analysis today"))
    counted = []
    for step in range(1, 6):
        trainer.global_steps = step
        metrics: dict[str, Any] = {}
        trainer.analysis.run(trainer, make_batch(), metrics, {})
        counted.append(metrics.get("quartile_analysis/failures"))
    return {"counted": counted, "asked": trainer.actor_rollout_wg.num_asked}


def lose_a_worker(dump_dir: str) -> str:
    from ray.exceptions import RayActorError

    trainer = StandIn(ON, dump_dir, RayActorError())
    try:
        trainer.analysis.run(trainer, make_batch(), {}, {})
    except Exception as raised:
        return type(raised).__name__
    return "nothing"
