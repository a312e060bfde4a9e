# SPDX-License-Identifier: Apache-2.0
"""What a gradient analysis needs of a trainer's actor; an adapter supplies it.

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
"""The request: into how many buckets, or with how many sampled tokens; which of the two says which analysis."""


@dataclass
class ActorMicroBatch:
    """One of training's micro-batches, without its filling rows, on the device."""

    inputs: dict[str, torch.Tensor]
    rows: torch.Tensor
    """int (B,): which of this rank's rows; empty if it runs only for the peers' collectives."""
    on_policy: bool
    """Whether the loss uses the present log-probs as the old ones."""


class Actor(Protocol):
    """The actor in training."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    """Where the model takes its inputs."""
    terms: tuple[str, ...]
    """The terms of the loss that carry gradient: ``task``, and of ``entropy`` and ``kl`` those that are on."""
    loss_scale: float
    """The fp16 scaler's factor; else 1."""
    grad_clip: float

    def micro_batches(self, rows: Rows) -> Iterator[ActorMicroBatch]:
        """Cut as training would; every rank gets the same number of micro-batches."""

    def runs(self, lengths: torch.Tensor) -> list[list[int]]:
        """Cut rows of these lengths, int (N,), longest first, into runs no larger than a micro-batch."""

    def forward(self, inputs: Rows, with_entropy: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_prob and entropy (B, T), with a graph; None: entropy where the loss needs it."""

    def log_prob(self, inputs: Rows) -> torch.Tensor:
        """(B, T), without a graph, as precise as possible."""

    def loss_terms(
        self, inputs: Rows, log_prob: torch.Tensor, entropy: torch.Tensor | None, on_policy: bool
    ) -> dict[str, torch.Tensor]:
        """The terms of training's loss on these values, coefficients included, as if they were the whole batch."""

    def share(self, part: ActorMicroBatch, term: str, num_rows: int) -> float:
        """A micro-batch's weight in a term of the whole batch, which has this many rows."""

    def aggregation(self, term: str) -> str:
        """How a term is averaged, by verl's name: ``token-mean``, ``seq-mean-token-mean``, ..."""

    def clip(self) -> torch.Tensor:
        """Clip ``.grad`` as training does; returns the norm before, a scalar."""


def cut_runs(lengths: torch.Tensor, num_tokens: int | None, num_rows: int) -> list[list[int]]:
    """Cut rows of these lengths, int (N,), into runs of at most ``num_tokens`` tokens; None: of ``num_rows`` rows."""
    costs, limit = ([1] * len(lengths), num_rows) if num_tokens is None else (lengths.tolist(), num_tokens)
    runs: list[list[int]] = []
    room = 0
    for row, cost in enumerate(costs):
        if not runs or cost > room:
            runs.append([])
            room = limit
        runs[-1].append(row)
        room -= cost
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
