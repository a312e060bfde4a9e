# SPDX-License-Identifier: Apache-2.0
"""Scenarios that every rank runs together: split a gradient by quartile, try updates."""

import copy
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.world.harness import make_batch, make_model, make_trainer
from tests.world.harness import part as ours
from tests.world.oracle import token_gradients

MICRO = 2
EIGHT_ROWS = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
]
"""Where every token has a backward of its own."""


def prepared(batch: Any, num_tokens: int = 0) -> tuple[Any, Any, Any]:
    """The batch as the trainer sends it, its quartiles (16, T), and the sampled tokens (S, 2)."""
    assign, sample_tokens = ours("analysis.quartiles").assign, ours("analysis.quartiles").sample_tokens
    batch = batch.select(deepcopy=True)
    mask = batch.batch["response_mask"].bool().numpy()
    quartiles = assign(batch.batch["old_log_probs"].numpy(), mask, "quantile")
    sampled = sample_tokens(quartiles, num_tokens, seed=1)
    numbers = torch.full(quartiles.shape, -1)
    for number, (row, position) in enumerate(sampled.tolist()):
        numbers[row, position] = number
    batch.batch["gradloc_bucket"] = torch.zeros(len(quartiles), dtype=torch.long)
    batch.batch["gradloc_quartile"] = torch.from_numpy(quartiles)
    batch.batch["gradloc_sample"] = numbers
    batch.batch["gradloc_row"] = torch.arange(len(quartiles))
    batch.meta_info["gradloc_num_sampled"] = len(sampled)
    return batch, quartiles, sampled


def all_rows(numbers: dict[str, Any], name: str) -> np.ndarray:
    """Every rank's log-probs, in the order of the batch's rows."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (numbers["rows"], numbers["log_probs"][name]))
    pairs = [
        pair for rows, values in parts for pair in zip(rows, (row for part in values for row in part), strict=True)
    ]
    found = np.zeros((len(pairs), max(len(values) for _, values in pairs)))
    for row, values in pairs:
        found[row, : len(values)] = values
    return found


def split(overrides: list[str], dump_dir: str, num_tokens: int = 6) -> dict[str, Any]:
    """Quartiles' gradients and single tokens', and the same from every token's own backward."""
    batch = make_batch(8)
    trainer = make_trainer([*EIGHT_ROWS, *overrides], dump_dir)
    data, quartiles, sampled = prepared(batch, num_tokens=num_tokens)
    numbers = trainer.analyze(data)
    model = make_model()
    gradients = by_row(token_gradients(trainer, model, batch), len(batch))
    whole = sum(gradients.values())
    parts = [sum(gradients[place] for place in gradients if quartiles[place] == quartile) for quartile in range(4)]
    return {
        "record": {key: value for key, value in numbers.items() if key not in ("log_probs", "steps")},
        "whole": float(whole.norm()),
        "norms": [float(part.norm()) for part in parts],
        "dots": [float(part @ whole) for part in parts],
        "loss_norms": [float(gradients[tuple(place)].norm()) for place in sampled.tolist()],
        "log_prob_norms": log_prob_norms(trainer, model, batch, sampled),
    }


def by_row(gradients: dict, num_rows: int) -> dict[tuple[int, int], torch.Tensor]:
    """(rank, micro-batch, row, position) -> (row of the batch, position)."""
    per_rank = num_rows // dist.get_world_size()
    return {
        (rank * per_rank + index * MICRO + row, position): gradient
        for (rank, index, row, position), gradient in gradients.items()
    }


def log_prob_norms(trainer: Any, model: torch.nn.Module, batch: Any, sampled: Any) -> list[float]:
    """The norm of each sampled token's d log pi / d weights, in a plain model."""
    log_probs = plain_log_probs(trainer, model, batch, has_graph=True)
    params = list(model.parameters())
    norms = []
    for row, position in sampled.tolist():
        grads = torch.autograd.grad(log_probs[row, position], params, retain_graph=True)
        norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
    return norms


def plain_log_probs(trainer: Any, model: torch.nn.Module, batch: Any, has_graph: bool = False):
    """(R, T): the response's log-probs from a plain model, by softmax and indexing."""
    inputs = batch.batch
    with torch.set_grad_enabled(has_graph):
        logits = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=inputs["position_ids"]
        ).logits
        length = inputs["responses"].shape[1]
        log_probs = logits[:, -length - 1 : -1].log_softmax(-1)
        return log_probs.gather(-1, inputs["responses"][..., None]).squeeze(-1)


def updates(overrides: list[str], dump_dir: str, num_before: int) -> dict[str, Any]:
    """Probability changes, and the same from a literal copy of model and optimizer."""
    trainer = make_trainer([*EIGHT_ROWS, *overrides], dump_dir)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=trainer.optimizer.param_groups[0]["lr"])
    for seed in range(1, num_before + 1):  # so that the optimizer has a past
        earlier = make_batch(8, seed=seed)
        gradients = token_gradients(trainer, model, earlier)
        take_step(model, optimizer, sum(gradients.values()), trainer.grad_clip)
        trainer.update(earlier)
    batch = make_batch(8)
    data, quartiles, _ = prepared(batch)
    record = trainer.analyze(data)
    fast = {name: all_rows(record, name) for name in record["log_probs"]}
    steps = {name: vars(step) for name, step in record["steps"].items()}
    gradients = by_row(token_gradients(trainer, model, batch), len(batch))
    mask = quartiles >= 0
    before = plain_log_probs(trainer, model, batch)
    out = {"before": float((torch.from_numpy(fast["before"]) - before)[mask].abs().max())}
    for name, chosen in (("all", range(4)), ("lowest", [0]), ("highest", [3]), ("none", [])):
        twin, its_optimizer = copy.deepcopy((model, optimizer))
        inside = [gradients[place] for place in gradients if quartiles[place] in chosen]
        part = sum(inside, torch.zeros_like(next(iter(gradients.values()))))
        clipped = take_step(twin, its_optimizer, part, trainer.grad_clip)
        change = plain_log_probs(trainer, twin, batch).exp() - before.exp()
        found = np.exp(fast[name]) - np.exp(fast["before"])
        size = float(change[mask].abs().max())
        moved = sum(
            float((new - old).square().sum()) for new, old in zip(twin.parameters(), model.parameters(), strict=True)
        )
        out[name] = {
            "size": size,
            "error": float((torch.from_numpy(found) - change)[mask].abs().max()) / size,
            "norm": (steps[name]["grad_norm"], clipped),
            "update_norm": (steps[name]["update_norm"], moved**0.5),
        }
    return out


def take_step(model, optimizer, gradient: torch.Tensor, clip: float) -> float:
    """One step of a plain model with a flat gradient; its norm before clipping."""
    at = 0
    for param in model.parameters():
        param.grad = gradient[at : at + param.numel()].view_as(param).clone()
        at += param.numel()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(found)


def fail_during_update(dump_dir: str) -> dict[str, bool]:
    """A trial step ends in an exception on every rank: everything is put back all the same."""
    trainer = make_trainer([], dump_dir)
    trainer.update(make_batch(seed=1))
    weights, state, seen = trainer.weights_hash(), len(trainer.optimizer.state), []
    read = ours("analysis.parts").Parts._log_probs

    def read_once(self):
        seen.append(trainer.weights_hash())
        if len(seen) > 1:
            raise ZeroDivisionError("not today")
        return read(self)

    try:
        with mock.patch.object(ours("analysis.parts").Parts, "_log_probs", read_once):
            trainer.analyze(prepared(make_batch())[0])
    except ZeroDivisionError:
        pass
    return {
        "moved": seen[1] != seen[0] == weights,
        "weights": trainer.weights_hash() == weights,
        "state": len(trainer.optimizer.state) == state,
    }


def odd(dump_dir: str, what: str) -> dict[str, Any]:
    """Batches in which something is missing or broken; the raw record and each rank's rows."""
    batch = make_batch()
    overrides: list[str] = []
    tensors = batch.batch
    if what == "nan advantage":
        lowest = tensors["old_log_probs"].masked_fill(tensors["response_mask"] == 0, 1.0)
        place = divmod(int(lowest.argmin()), lowest.shape[1])
        tensors["advantages"][place] = float("nan")
    elif what == "ties":
        tensors["old_log_probs"].fill_(-1.0)
    elif what == "three tokens":
        tensors["response_mask"].zero_()
        for row in (0, 9, 13):
            tensors["response_mask"][row, 0] = 1
    elif what == "no step size":
        overrides.append("actor_rollout_ref.actor.optim.lr=0.0")
    trainer = make_trainer(overrides, dump_dir)
    data, quartiles, _ = prepared(batch, num_tokens=4)
    record = trainer.analyze(data)
    before, found = all_rows(record, "before"), {name: each for name, each in record["log_probs"].items()}
    changes = {
        name: None if each is None else float(np.abs(all_rows(record, name) - before).max())
        for name, each in found.items()
        if name != "before"
    }
    steps = {name: step and vars(step) for name, step in record["steps"].items()}
    return {
        "record": {**record, "steps": steps, "log_probs": None},
        "counts": [int((quartiles == quartile).sum()) for quartile in range(4)],
        "largest_change": changes,
    }
