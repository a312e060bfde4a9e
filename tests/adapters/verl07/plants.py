# SPDX-License-Identifier: Apache-2.0
"""Spikes of a known size in verl's actor: planted by the oracle's norms, searched, and held against them."""

import random
from typing import Any

import torch.distributed as dist

from tests.world.harness import make_batch, make_model, make_trainer
from tests.world.oracle import Oracle, Place
from tests.world.spikes import ON

KINDS = ("three", "eight", "mixture", "pair")
_TAU = 40.0  # a threshold of some four times the healthy norm
_SIZES = {"three": (10, 6, 4), "eight": (10, 8, 7, 6, 5, 4.5, 4, 4)}  # in healthy norms, before all are made louder
_ROWS, _PER_MICRO_BATCH = 16, 4


def search(kind: str, seed: int, mode: str, dtype: str, dump_dir: str) -> dict[str, Any] | None:
    """Plant, update once on two ranks of two micro-batches, and say what the event told; None but on rank 0.

    ``three`` and ``eight`` tokens in as many rows, 1.2 to 12 times as loud as a threshold that four healthy norms make;
    a ``mixture`` of a whole row and a token elsewhere; a ``pair`` that cancels, two and a half to five times as loud as
    a third token.
    """
    draw, batch = random.Random(1000 * seed + len(kind)), make_batch(seed=seed)
    rows = draw.sample(range(_ROWS), 8)
    tensors = batch.batch
    if kind == "pair":
        for name in ("input_ids", "responses", "old_log_probs", "attention_mask", "position_ids", "response_mask"):
            tensors[name][rows[1]] = tensors[name][rows[0]]
        tensors["advantages"][rows[1]] = tensors["advantages"][rows[0]].clone()
    lengths = tensors["response_mask"].sum(1).tolist()
    threshold = _TAU / sum(lengths) ** 0.5
    actor = "actor_rollout_ref.actor"
    settings = [f"{actor}.grad_norm_threshold={_TAU}", f"{actor}.fsdp_config.dtype={dtype}"]
    settings += [f"{actor}.gradloc.action.mode={mode}", f"{actor}.gradloc.action.max_masked_share=0.5"]
    trainer = make_trainer([*ON, *settings], dump_dir)
    oracle = Oracle(trainer, make_model(), batch)
    planted: list[tuple[int, int]] = []

    def loud(row: int, size: float, position: int | None = None) -> None:
        """One token of the row, with a gradient of so many thresholds."""
        position = draw.randrange(int(lengths[row])) if position is None else position
        tensors["advantages"][row, position] *= size * threshold / float(oracle[_place(row, position)].norm())
        planted.append((row, position))

    def signed(size: float) -> float:
        return draw.choice((1, -1)) * size

    if kind in _SIZES:
        times = 1.2 * 10 ** draw.random()
        for row, size in zip(rows, _SIZES[kind], strict=False):
            loud(row, signed(size / 4 * times))
    elif kind == "mixture":
        whole = range(int(lengths[rows[0]]))
        norm = float(sum(oracle[_place(rows[0], position)] for position in whole).norm())
        tensors["advantages"][rows[0]] *= draw.uniform(2, 12) * threshold / norm
        planted += [(rows[0], position) for position in whole]
        loud(rows[1], signed(draw.uniform(1.2, 8)))
    else:
        position, size = draw.randrange(int(lengths[rows[0]])), draw.uniform(5, 10)
        loud(rows[0], size, position)
        loud(rows[1], -size, position)
        loud(rows[2], 2.0)
    oracle = Oracle(trainer, make_model(), batch)
    events = trainer.update(batch)["events"]
    if dist.get_rank() != 0:
        return None
    (event,) = events
    named = [(culprit["row"], position) for culprit in event["culprits"] for position in culprit["positions"]]
    return {
        "missed": sorted(set(planted) - set(named)),
        "weak": [place for place in named if float(oracle[_place(*place)].norm()) < threshold / 10],
        "planted": planted,
        "event": event,
    }


def _place(row: int, position: int) -> Place:
    """Rank, micro-batch and row in it, position: how the rows are dealt to two ranks."""
    rank, of_rank = divmod(row, _ROWS // 2)
    return rank, of_rank // _PER_MICRO_BATCH, of_rank % _PER_MICRO_BATCH, position
