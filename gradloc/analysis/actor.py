# SPDX-License-Identifier: Apache-2.0
"""What a gradient analysis asks of a trainer's actor: a few powers, which an adapter gives it.

Shapes: R rows on this rank, B rows of a micro-batch, T response positions.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.gradients import GradientSpace
from ..core.step import RngState

Rows = Mapping[str, torch.Tensor]
"""This rank's part of the batch, every tensor with R rows, in host memory: what the model and the loss read."""

BUCKET_KEY = "gradloc_bucket"
"""int (R,) among the rows: each one's bucket, -1 for rows that only fill up the ranks."""
NUM_BUCKETS_KEY, NUM_SAMPLED_KEY = "gradloc_num_buckets", "gradloc_num_sampled"
"""Sent along with the rows: how many buckets there are, or how many tokens are sampled. It says which analysis is
asked for."""


@dataclass
class MicroBatch:
    """One of training's micro-batches, without its filling rows, on the device."""

    inputs: dict[str, torch.Tensor]
    rows: torch.Tensor
    """int (B,): which of this rank's rows they are; empty where it is run only for the collectives of peers."""
    on_policy: bool
    """Whether the loss takes the present log-probs for the old ones."""


class Actor(Protocol):
    """The actor that is trained; an adapter knows whose it is."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    """Where the model takes its inputs."""
    terms: tuple[str, ...]
    """The terms of the loss that carry gradient: ``task``, and of ``entropy`` and ``kl`` those that are on."""
    loss_scale: float
    """What the fp16 scaler multiplies a loss with, so that small gradients do not vanish; else 1."""
    grad_clip: float

    def micro_batches(self, rows: Rows) -> Iterator[MicroBatch]:
        """Cut as training would; every rank gets the same number of micro-batches."""

    def runs(self, lengths: torch.Tensor) -> list[list[int]]:
        """Cut rows of these lengths, int (N,), longest first, into runs that fit where a micro-batch fits."""

    def forward(self, inputs: Rows, with_entropy: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_prob and entropy (B, T), with a graph; None: entropy where the loss needs it."""

    def log_prob(self, inputs: Rows) -> torch.Tensor:
        """(B, T), without a graph, read out as precisely as can be."""

    def loss_terms(
        self, inputs: Rows, log_prob: torch.Tensor, entropy: torch.Tensor | None, on_policy: bool
    ) -> dict[str, torch.Tensor]:
        """The terms of training's loss on these values, coefficients included, as if they were the whole batch."""

    def share(self, part: MicroBatch, term: str, num_rows: int) -> float:
        """A micro-batch's weight in a term of the whole batch, which has this many rows."""

    def aggregation(self, term: str) -> str:
        """verl's name of how a term is averaged: ``token-mean``, ``seq-mean-token-mean``, ..."""

    def clip(self) -> torch.Tensor:
        """Clip what is in ``.grad`` as training does; its norm before, a scalar."""


def pick_rows(rows: Rows, chosen: list[int], device: torch.device) -> dict[str, torch.Tensor]:
    """Some of the rows, in that order, on the device."""
    return {key: values[chosen].to(device) for key, values in rows.items()}


def cut_runs(lengths: torch.Tensor, num_tokens: int | None, num_rows: int) -> list[list[int]]:
    """Cut rows into runs.

    Args:
        lengths: int (N,), of the rows.
        num_tokens: that fit into one run; None: what fits is a number of rows.
        num_rows: that many.
    """
    if num_tokens is None:
        return [list(range(len(lengths)))[start : start + num_rows] for start in range(0, len(lengths), num_rows)]
    runs: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        if not runs or length > room:
            runs.append([])
            room = num_tokens
        runs[-1].append(row)
        room -= length
    return runs


@contextmanager
def undisturbed(actor: Actor, space: GradientSpace) -> Iterator[None]:
    """Put back what an analysis touches: gradients, random state, train or eval mode."""
    rng, gradient = RngState(actor.device), space.take()
    was_training = actor.module.training
    actor.module.train()
    try:
        yield
    finally:
        space.put(gradient)
        rng.restore()
        actor.module.train(was_training)
