# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: split a gradient, and compare the parts with training's own."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.world.harness import local_of, make_batch, make_trainer
from tests.world.harness import part as ours

UNEVEN = [0, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 2, 1, 2, 2, 1]
"""The bucket of each of 16 rows: sizes 1, 5 and 10, scattered over ranks and micro-batches."""
TERMS = [
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.3",
    "actor_rollout_ref.actor.kl_loss_type=k2",
    "actor_rollout_ref.actor.entropy_coeff=0.05",
]


def training_step(trainer: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Return what verl's own update leaves in ``.grad`` (this rank's shard, flat), and the loss."""
    rng, backward, gradient, losses = torch.get_rng_state(), torch.Tensor.backward, [], []

    def keep_loss(loss: torch.Tensor, *given: Any) -> None:
        losses.append(float(loss.detach()))
        backward(loss, *given)

    def keep_gradient() -> torch.Tensor:
        gradient.extend(param.grad for param in trainer.module.parameters())
        return torch.tensor(0.0)

    owner, name = trainer.steps_in
    with mock.patch.object(owner, name, keep_gradient), mock.patch.object(torch.Tensor, "backward", keep_loss):
        trainer.update(batch)
    torch.set_rng_state(rng)
    total = torch.tensor([sum(losses)])
    dist.all_reduce(total)
    return flat(gradient), float(total) / dist.get_world_size()


def flat(gradient: list[Any]) -> torch.Tensor:
    return torch.cat([local_of(grad).flatten().double() for grad in gradient if grad is not None])


def norm(shard: torch.Tensor) -> float:
    square = shard.square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def by_bucket(trainer: Any, batch: Any, buckets: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return each term's gradient as the sum of its buckets' parts, and the workers' answer."""
    module, made = ours("analysis.parts"), []

    class Noted(module.Parts):
        def __init__(self, of):
            super().__init__(of)
            made.append(self)

    with mock.patch.object(module, "Parts", Noted):
        numbers = trainer.analyze(with_buckets(batch, buckets))
    return {term: flat(gradient) for term, gradient in made[0].whole.items()}, numbers


def with_buckets(batch: Any, buckets: list[int]) -> Any:
    """Return the batch as the trainer sends it to the workers."""
    batch = batch.select(deepcopy=True)
    batch.batch["gradloc_bucket"] = torch.tensor(buckets)
    batch.meta_info["gradloc_num_buckets"] = max(buckets) + 1
    return batch


def split(overrides: list[str], dump_dir: str, buckets: list[int] = UNEVEN) -> dict[str, Any]:
    """Split a batch's gradient; return how far its parts are from what they should add up to."""
    batch = make_batch(len(buckets))
    trainer = make_trainer(TERMS + overrides, dump_dir)
    training, loss = training_step(trainer, batch)
    alone = make_trainer(overrides, dump_dir)
    task_alone, task_loss = training_step(alone, batch)
    whole, record = by_bucket(trainer, batch, buckets)
    return {
        "training_norm": norm(training),
        "total_error": norm(sum(whole.values()) - training) / norm(training),
        "task_error": norm(whole["task"] - task_alone) / norm(task_alone),
        "loss": loss,
        "task_loss": task_loss,
        "losses": dict(zip(record["terms"], np.sum(record["losses"], axis=0), strict=True)),
        "weights": np.sum(record["weights"], axis=0).tolist(),
        "record": record,
    }


def dot_of_unlike_rows(dump_dir: str) -> dict[str, Any]:
    """Rows that say the same, and the opposite: their task gradients' cosines."""
    trainer = make_trainer(["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], dump_dir)
    batch = make_batch(16)
    for value in batch.batch.values():
        value[:] = value[:1].clone()
    batch.batch["advantages"][8:12] *= -2
    batch.batch["advantages"][12:] = 0
    return trainer.analyze(with_buckets(batch, [0] * 8 + [1] * 4 + [2] * 4))


def by_quartile(batch: Any) -> Any:
    """The batch as the trainer sends it to the workers, with one sampled token."""
    pure, batch = ours("analysis.quartiles"), batch.select(deepcopy=True)
    mask = batch.batch["response_mask"].bool().numpy()
    quartiles = pure.assign(batch.batch["old_log_probs"].numpy(), mask, "quantile")
    ((row, position),) = pure.sample_tokens(quartiles, 1, seed=1)
    numbers = torch.full(quartiles.shape, -1)
    numbers[row, position] = 0
    batch.batch["gradloc_bucket"] = torch.zeros(len(quartiles), dtype=torch.long)
    batch.batch["gradloc_quartile"] = torch.from_numpy(quartiles)
    batch.batch["gradloc_sample"] = numbers
    batch.batch["gradloc_row"] = torch.arange(len(quartiles))
    batch.meta_info["gradloc_num_sampled"] = 1
    return batch


def requested(kind: str, batch: Any) -> Any:
    """The batch as the trainer sends it for an analysis by ``buckets`` or by ``quartiles``."""
    return with_buckets(batch, UNEVEN) if kind == "buckets" else by_quartile(batch)


def with_filling_row(kind: str, dump_dir: str, overrides: list[str]) -> dict[str, Any]:
    """15 rows and one that fills up the ranks, in a micro-batch of its own or with others; the same with other numbers
    in that row."""
    numbers = []
    for factor in (1.0, 1e3):
        batch = make_batch(16)
        batch.batch["advantages"][15] *= factor
        batch.batch["ref_log_prob"][15] -= factor
        data = requested(kind, batch)
        for key in {"gradloc_bucket", "gradloc_quartile"} & set(data.batch.keys()):
            data.batch[key][15] = -1
        numbers.append(make_trainer(TERMS + overrides, dump_dir).analyze(data))
    kept = [{key: each.get(key) for key in ("norms", "dots", "weights", "closure")} for each in numbers]
    return {"same": kept[0] == kept[1], **kept[0]}


def train(kind: str, overrides: list[str], dump_dir: str, with_analysis: bool) -> dict[str, Any]:
    """Real updates, with an analysis before each or none; by quartiles with trial steps."""
    trainer = make_trainer(TERMS + overrides, dump_dir, dropout=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 / (1 + step))
    norms, records = [], []
    for step in (1, 2):
        batch = make_batch(seed=step)
        if with_analysis:
            records.append(trainer.analyze(requested(kind, batch)))
        norms.append(trainer.update(batch)["metrics"]["actor/grad_norm"])
        scheduler.step()
    return {
        "weights": trainer.weights_hash(),
        "rng": torch.get_rng_state().numpy().tobytes(),
        "norms": norms,
        "rate": scheduler.get_last_lr(),
        "analyses": len(records),
        "steps_taken": [step.is_taken for record in records for step in record.get("steps", {}).values()],
    }


def fail_on_one_rank(kind: str, dump_dir: str) -> dict[str, Any]:
    """The loss, or cutting the rows, raises on rank 1 during the analysis; both ranks then train on."""
    trainer, plain = make_trainer(TERMS, dump_dir), make_trainer(TERMS, dump_dir)
    data, breaks = requested(kind, make_batch()), nullcontext()
    if dist.get_rank() == 1:
        in_rows = mock.patch.object(ours("core.probe").Prober, "_runs", _broken)
        breaks = trainer.broken_loss(_broken) if kind == "buckets" else in_rows
    with breaks:
        record = trainer.analyze(data)
    trainer.update(make_batch())
    plain.update(make_batch())
    return {"record": record, "is_same": trainer.weights_hash() == plain.weights_hash()}


def _broken(*_, **__):
    raise ZeroDivisionError("no analysis today")


def leave_as_found(kind: str, overrides: list[str], dump_dir: str) -> dict[str, bool]:
    """An actor in the middle of something, before its first step: no optimizer state yet."""
    trainer = make_trainer(TERMS + overrides, dump_dir)
    for param in trainer.module.parameters():
        param.grad = torch.ones_like(param)
    before = [param.grad for param in trainer.module.parameters()]
    weights, groups, rng = trainer.weights_hash(), copy.deepcopy(options(trainer)), torch.get_rng_state()
    trainer.module.eval()
    actor = getattr(trainer, "actor", SimpleNamespace())  # which verl 0.9 does not have
    actor.gradient_accumulation = 7
    record = trainer.analyze(requested(kind, make_batch()))
    after = [param.grad for param in trainer.module.parameters()]
    return {
        "was_moved": all(step.update_norm > 0 for step in record.get("steps", {}).values()),
        "gradients": all(old is new for old, new in zip(before, after, strict=True)),
        "values": all(bool((local == 1).all()) for local in map(local_of, after)),
        "weights": trainer.weights_hash() == weights,
        "optimizer": not trainer.optimizer.state,
        "groups": options(trainer) == groups,
        "rng": torch.equal(rng, torch.get_rng_state()),
        "mode": not trainer.module.training,
        "count": actor.gradient_accumulation == 7,
    }


def options(trainer: Any) -> list[dict[str, Any]]:
    """Everything in the optimizer's groups but the parameters."""
    groups = trainer.optimizer.param_groups
    return [{key: group[key] for key in group if key != "params"} for group in groups]
