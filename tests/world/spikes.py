# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: plant, update, and hold the event against the oracle."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.world.harness import make_batch, make_trainer, model_of
from tests.world.models import own_loss
from tests.world.oracle import Oracle
from tests.world.settings import require

ON = ["actor_rollout_ref.actor.spike_detection=True"]


def plant(batch: Any, row: int, position: int, advantage: float) -> None:
    """Set one token's advantage; position -1 is the last response token of the row."""
    length = int(batch.batch["response_mask"][row].sum())
    batch.batch["advantages"][row, position % length] = advantage


def answer(batch: Any, first: int, end: int) -> None:
    """A tool's answer inside of every response: attended to and not trained on, with numbers that would spike."""
    batch.batch["response_mask"][:, first:end] = 0
    batch.batch["advantages"][:, first:end] = 1e6
    batch.batch["old_log_probs"][:, first:end] = -30.0


def address(event: dict[str, Any]) -> set[tuple[int, int]]:
    """(row of the batch, response position) of every culprit."""
    return {(culprit["row"], culprit["positions"][0]) for culprit in event["culprits"]}


def localize_planted(
    plants: list[tuple[int, int, float]],
    overrides: list[str],
    dump_dir: str,
    rollout_noise: float | None = None,
    answered: tuple[int, int] | None = None,
    has_own_loss: bool = False,
    excluded: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Plant, run one update, and report event and oracle side by side (the oracle on rank 0).

    ``answered``: response positions [first, end) that a tool has written, see :func:`answer`. ``has_own_loss``: train
    with a loss that a user registered. ``excluded``: row and position of a token that the reference policy excludes.
    """
    overrides = overrides + (own_loss.register() if has_own_loss else [])
    batch = make_batch(rollout_noise=rollout_noise)
    if answered is not None:
        answer(batch, *answered)
    for row, position, advantage in plants:
        plant(batch, row, position, advantage)
    if excluded is not None:
        batch.batch["ref_log_prob"][excluded] = -60.0
    trainer = make_trainer(ON + overrides, dump_dir)
    model = model_of(overrides)
    oracle = Oracle(trainer, model, batch) if dist.get_rank() == 0 else None
    out = trainer.update(batch)
    event = out["events"][0] if out["events"] else None
    if oracle is None:
        return {"event": event}
    found = oracle.account(event["culprits"] if event else [])
    lengths = batch.batch["response_mask"].sum(1).tolist()
    return {
        "event": event,
        "metrics": out["metrics"],
        "planted": sorted((row, position % int(lengths[row])) for row, position, _ in plants),
        "oracle_head_norm": _head_norm(model, found.pop("gradient")),
        **{f"oracle_{name}": value for name, value in found.items()},
    }


def _head_norm(model: torch.nn.Module, gradient: torch.Tensor) -> float:
    """Return the norm of the output head's part of a flat gradient; 0 where the head is frozen."""
    named = [(name, param.numel()) for name, param in model.named_parameters() if param.requires_grad]
    parts = gradient.split([count for _, count in named])
    return sum(float(part.norm()) for (name, _), part in zip(named, parts, strict=True) if "lm_head" in name)


KL = [
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=10.0",
    "actor_rollout_ref.actor.kl_loss_type=k2",
]


def train(
    overrides: list[str],
    dump_dir: str,
    num_steps: int,
    dropout: float = 0.0,
    spike_at: int = 0,
    rollout_noise: float | None = None,
) -> dict:
    """Real updates; returns what they leave behind. ``spike_at`` plants a spike at that step."""
    trainer = make_trainer(overrides, dump_dir, dropout=dropout)
    norms, events = [], []
    for step in range(1, num_steps + 1):
        batch = make_batch(seed=step, rollout_noise=rollout_noise)
        if step == spike_at:
            plant(batch, 6, 2, 1e4)
        out = trainer.update(batch)
        norms.append(out["metrics"]["actor/grad_norm"])
        events += out["events"]
    return {
        "weights": trainer.weights_hash(),
        "rng": torch.get_rng_state().numpy().tobytes(),
        "norms": norms,
        "events": len(events),
        "metrics": out["metrics"],
    }


PLANTED = {"nan": (10, 3, float("nan")), "inf": (1, 0, float("inf")), "spike": (5, 3, 1e4), "later": (6, 2, -1e4)}


def update_batch(kind: str, overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """One update on a batch of the given kind, and a healthy one after it."""
    batch = make_batch()
    if kind in PLANTED:
        plant(batch, *PLANTED[kind])
    trainer = make_trainer(overrides, dump_dir)
    out = trainer.update(batch)
    after = trainer.update(make_batch(seed=1))
    return {
        "event": out["events"][0] if out["events"] else None,
        "metrics": out["metrics"],
        "tokens": batch.batch["response_mask"].sum(1).tolist(),
        "rewards": batch.batch["token_level_scores"].sum(1).tolist(),
        "next_norm": after["metrics"]["actor/grad_norm"][0][0],
    }


def announced(overrides: list[str], dump_dir: str) -> list[tuple[int, list[str]]]:
    """What a spike's update sends to verl's ``file`` tracker: the step, and the names of the culprits' sequences."""
    batch, sent = make_batch(), []
    plant(batch, *PLANTED["spike"])
    trainer = make_trainer(overrides, dump_dir)
    require(trainer.has_driver, "it has its trackers itself")
    trainer.trackers["file"] = SimpleNamespace(log=lambda data, step: sent.append((step, data["gradloc/culprits"])))
    trainer.update(batch)
    return [(step, [culprit["sequence"] for culprit in culprits]) for step, culprits in sent]


def overflow(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """A healthy fp16 step whose loss scale is far too large, as at the start of every fp16 run."""
    trainer = make_trainer(overrides, dump_dir)
    trainer.scaler._init_scale = 2.0**120
    out = trainer.update(make_batch())
    return {"norm": out["metrics"]["actor/grad_norm"][0][0], "events": len(out["events"])}
