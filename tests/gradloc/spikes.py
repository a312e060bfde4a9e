# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: plant, update, and hold the event against the oracle."""

from typing import Any

import torch
import torch.distributed as dist

from tests.gradloc.harness import make_batch, make_model, make_trainer
from tests.gradloc.oracle import token_gradients

ON = ["actor_rollout_ref.actor.spike_detection=True"]


def plant(batch: Any, row: int, position: int, advantage: float) -> None:
    """Set one token's advantage; position -1 is the last response token of the row."""
    length = int(batch.batch["response_mask"][row].sum())
    batch.batch["advantages"][row, position % length] = advantage


def address(event: dict[str, Any]) -> set[tuple[int, int]]:
    """(row of the batch, response position) of every culprit."""
    return {(culprit["row"], culprit["positions"][0]) for culprit in event["culprits"]}


def localize_planted(plants: list[tuple[int, int, float]], overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """Plant, run one update, and report event and oracle side by side (the oracle on rank 0)."""
    batch = make_batch()
    for row, position, advantage in plants:
        plant(batch, row, position, advantage)
    trainer = make_trainer(ON + overrides, dump_dir)
    oracle = token_gradients(trainer, make_model(), batch) if dist.get_rank() == 0 else {}
    out = trainer.update(batch)
    event = out["events"][0] if out["events"] else None
    if dist.get_rank() != 0:
        return {"event": event}
    norms = {key: float(value.norm()) for key, value in oracle.items()}
    total = sum(oracle.values())
    culprits = []
    if event is not None:
        for culprit in event["culprits"]:
            key = (culprit["rank"], culprit["micro_batch"], culprit["micro_batch_row"], culprit["positions"][0])
            culprits.append(oracle[key])
    without = total - sum(culprits) if culprits else total
    return {
        "event": event,
        "metrics": out["metrics"],
        "planted": sorted((row, position % int(batch.batch["response_mask"][row].sum())) for row, position, _ in plants),
        "oracle_norm": float(total.norm()),
        "oracle_norm_without": float(without.norm()),
        "oracle_shares": [float(g @ total / (total @ total)) for g in culprits],
        "oracle_culprit_norms": [float(g.norm()) for g in culprits],
        "largest_norms": sorted(norms.values(), reverse=True)[:4],
    }
