# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: split a gradient, hold it against training's own."""

import copy
from contextlib import nullcontext
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
    """What verl's own update leaves in ``.grad`` (this rank's shard, flat), and the loss."""
    rng = torch.get_rng_state()
    gradient, loss = trainer.training_gradient(batch)
    torch.set_rng_state(rng)
    total = torch.tensor([loss])
    dist.all_reduce(total)
    return flat(gradient), float(total) / dist.get_world_size()


def flat(gradient: list[Any]) -> torch.Tensor:
    return torch.cat([local_of(grad).flatten().double() for grad in gradient if grad is not None])


def norm(shard: torch.Tensor) -> float:
    square = shard.square().sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def taken_apart(trainer: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """A finished :class:`Parts` of the prepared batch, which keeps each gradient that it took, and what it answered."""
    module, seen = ours("analysis.parts"), []

    class Keeping(module.Parts):
        def __init__(self, of):
            self.kept = []
            super().__init__(of)
            seen.append(self)

        def gradient(self, records, selected):
            self.kept.append(super().gradient(records, selected))
            return self.kept[-1]

    with mock.patch.object(module, "Parts", Keeping):
        numbers = trainer.analyze(data)
    return seen[0], numbers


def by_bucket(trainer: Any, batch: Any, buckets: list[int]) -> tuple[list[dict], dict, dict]:
    """Each bucket's part of each term, the whole of each term, and what the workers answer."""
    taken, numbers = taken_apart(trainer, with_buckets(batch, buckets))
    kept = iter(taken.kept)
    return [{term: next(kept) for term in taken.terms} for _ in range(max(buckets) + 1)], taken.whole, numbers


def with_buckets(batch: Any, buckets: list[int]) -> Any:
    """The batch as the trainer sends it to the workers."""
    batch = batch.select(deepcopy=True)
    batch.batch["gradloc_bucket"] = torch.tensor(buckets)
    batch.meta_info["gradloc_num_buckets"] = max(buckets) + 1
    return batch


def split(overrides: list[str], dump_dir: str, buckets: list[int] = UNEVEN) -> dict[str, Any]:
    """Split a batch's gradient; how far its parts are from what they should add up to."""
    batch = make_batch(len(buckets))
    trainer = make_trainer(TERMS + overrides, dump_dir)
    training, loss = training_step(trainer, batch)
    alone = make_trainer(overrides, dump_dir)
    task_alone, _ = training_step(alone, batch)
    parts, whole, record = by_bucket(trainer, batch, buckets)
    whole = {term: flat(gradient) for term, gradient in whole.items()}
    _, together, _ = by_bucket(trainer, batch, [0] * len(buckets))
    return {
        "training_norm": norm(training),
        "total_error": norm(sum(whole.values()) - training) / norm(training),
        "task_error": norm(whole["task"] - task_alone) / norm(task_alone),
        "bucket_sum_error": norm(sum(flat(part["task"]) for part in parts) - flat(together["task"])) / norm(task_alone),
        "slow_errors": slow_errors(trainer, batch, buckets, parts),
        "loss": loss,
        "loss_sum": float(np.sum(record["losses"])),
        "weights": np.sum(record["weights"], axis=0).tolist(),
        "record": record,
    }


def slow_errors(trainer: Any, batch: Any, buckets: list[int], by_bucket: list[dict]) -> list[float]:
    """Each bucket's part against the loss's own backward, all other rows detached."""
    data, errors, space = with_buckets(batch, buckets), [], ours("core.gradients").GradientSpace(trainer.module)
    for bucket, parts in enumerate(by_bucket):
        chosen = data.batch["gradloc_bucket"][:, None].expand_as(data.batch["response_mask"]) == bucket
        slow = flat(trainer.detached_gradient(data, chosen, space))
        errors.append(norm(sum(flat(part) for part in parts.values()) - slow) / norm(slow))
    return errors


def dot_of_unlike_rows(dump_dir: str) -> dict[str, Any]:
    """Rows that say the same, and the opposite: their task gradients' cosines."""
    trainer = make_trainer(["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], dump_dir)
    batch = make_batch(16)
    for value in batch.batch.values():
        value[:] = value[:1].clone()
    batch.batch["advantages"][8:12] *= -2
    batch.batch["advantages"][12:] = 0
    return trainer.analyze(with_buckets(batch, [0] * 8 + [1] * 4 + [2] * 4))


def by_quartile(batch: Any, num_tokens: int) -> tuple[Any, Any, Any]:
    """The batch as the trainer sends it to the workers, its quartiles (R, T), and the sampled tokens (S, 2)."""
    pure, batch = ours("analysis.quartiles"), batch.select(deepcopy=True)
    mask = batch.batch["response_mask"].bool().numpy()
    quartiles = pure.assign(batch.batch["old_log_probs"].numpy(), mask, "quantile")
    sampled = pure.sample_tokens(quartiles, num_tokens, seed=1)
    numbers = torch.full(quartiles.shape, -1)
    for number, place in enumerate(map(tuple, sampled)):
        numbers[place] = number
    batch.batch["gradloc_bucket"] = torch.zeros(len(quartiles), dtype=torch.long)
    batch.batch["gradloc_quartile"] = torch.from_numpy(quartiles)
    batch.batch["gradloc_sample"] = numbers
    batch.batch["gradloc_row"] = torch.arange(len(quartiles))
    batch.meta_info["gradloc_num_sampled"] = len(sampled)
    return batch, torch.from_numpy(quartiles), sampled


def split_by_quartile(overrides: list[str], dump_dir: str) -> dict[str, Any]:
    """How far quartiles' and sampled tokens' gradients are from the loss's own backward, all other tokens detached."""
    batch = make_batch()
    trainer = make_trainer(TERMS + overrides, dump_dir)
    training, _ = training_step(trainer, batch)
    data, quartiles, sampled = by_quartile(batch, num_tokens=3)
    taken, numbers = taken_apart(trainer, data)
    space = ours("core.gradients").GradientSpace(trainer.module)

    def slow(chosen: torch.Tensor) -> torch.Tensor:
        return flat(trainer.detached_gradient(data, chosen, space))

    def one(place: Any) -> torch.Tensor:
        chosen = torch.zeros_like(quartiles, dtype=torch.bool)
        chosen[tuple(place)] = True
        return chosen

    parts = [flat(part) for part in taken.kept[:4]]
    return {
        "sum_error": norm(sum(parts) - training) / norm(training),
        "part_errors": [norm(part - slow(quartiles == each)) / norm(part) for each, part in enumerate(parts)],
        "token_norms": [
            (norm(slow(one(place))), token) for place, token in zip(sampled, numbers["tokens"], strict=True)
        ],
    }


def requested(kind: str, batch: Any) -> Any:
    """The batch as the trainer sends it for an analysis by ``buckets`` or by ``quartiles``."""
    return with_buckets(batch, UNEVEN) if kind == "buckets" else by_quartile(batch, num_tokens=1)[0]


def with_filling_row(kind: str, dump_dir: str) -> dict[str, Any]:
    """15 rows and one that fills up the ranks; the same with other numbers in that row."""
    numbers = []
    for factor in (1.0, 1e3):
        batch = make_batch(16)
        batch.batch["advantages"][15] *= factor
        batch.batch["ref_log_prob"][15] -= factor
        data = requested(kind, batch)
        for key in {"gradloc_bucket", "gradloc_quartile"} & set(data.batch.keys()):
            data.batch[key][15] = -1
        numbers.append(make_trainer(TERMS, dump_dir).analyze(data))
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
    trainer.actor.gradient_accumulation = 7
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
        "count": trainer.actor.gradient_accumulation == 7,
    }


def options(trainer: Any) -> list[dict[str, Any]]:
    """Everything in the optimizer's groups but the parameters."""
    groups = trainer.optimizer.param_groups
    return [{key: group[key] for key in group if key != "params"} for group in groups]
