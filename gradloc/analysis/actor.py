# SPDX-License-Identifier: Apache-2.0
"""What a gradient analysis needs of a trainer's actor, which an adapter supplies, and what every analysis does with it:
gradients of weighted sums over the batch's log-probs and entropies, whichever rank has the rows.

Rows run together whatever micro-batches they came from. Ranks hold unequal parts of a sum: one that has run out of
rows runs a row with zero weight, because its peers' collectives wait for it.

Shapes: R rows on this rank, B rows of a micro-batch, T response positions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..core.gradients import Gradient, GradientSpace
from ..core.ranks import Ranks
from ..core.sharding import local_shard

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


Weights = dict[str, torch.Tensor]
"""The factors (R, T) in the sum: ``log_prob``, ``entropy`` or both."""


def only(weights: Weights, chosen: torch.Tensor) -> Weights:
    """The weights of the chosen tokens, 0 for all others, even where theirs is not finite."""
    return {name: values.where(chosen, 0.0) for name, values in weights.items()}


class RowProbe:
    """What every analysis does on one rank; every rank makes the same calls in the same order.

    Args:
        actor: whose gradient it is.
        ranks: the data-parallel ranks.
        space: the actor's parameters; ``.grad`` is scratch space.
        rows: this rank's, as many as every other rank has.
    """

    def __init__(self, actor: Actor, ranks: Ranks, space: GradientSpace, rows: Rows):
        self.actor, self.ranks, self.space, self.rows = actor, ranks, space, rows
        self.num_forwards = self.num_backwards = 0
        self._lengths = rows["attention_mask"].sum(-1)
        self._shortest = int(self._lengths.argmin())

    def gradient(self, weights: Weights) -> Gradient:
        """The gradient of the weighted sum over all ranks, moved to host memory."""
        runs = self.ranks.agree(lambda: self._runs(weights))
        self.space.clear()
        for index in range(int(self.ranks.max([len(runs)])[0])):
            self._backward(weights, runs[index] if index < len(runs) else None)
        return self.take()

    def _runs(self, weights: Weights) -> list[list[int]]:
        """Cut the rows with a weight into runs that fit where training's micro-batches fit, longest rows first."""
        has_weight = torch.stack([(values != 0).any(-1) for values in weights.values()]).any(0).cpu()  # NaN is one
        rows = has_weight.nonzero().flatten()
        rows = rows[self._lengths[rows].argsort(descending=True, stable=True)]
        return [rows[run].tolist() for run in self.actor.runs(self._lengths[rows])]

    def _backward(self, weights: Weights, run: list[int] | None) -> None:
        self.num_forwards += 1
        self.num_backwards += 1
        rows = [self._shortest] if run is None else run
        inputs = {key: values[rows].to(self.actor.device) for key, values in self.rows.items()}
        log_prob, entropy = self.actor.forward(inputs, with_entropy="entropy" in weights)
        outputs = {"log_prob": log_prob, "entropy": entropy}
        total = torch.zeros((), device=log_prob.device)
        for name, values in weights.items():
            factors = torch.zeros_like(values[rows]) if run is None else values[rows]
            total = total + (outputs[name] * factors).sum()
        (total * self.actor.loss_scale).backward()

    def take(self) -> Gradient:
        """Move what is in ``.grad`` to host memory, in the scale of the loss."""
        if self.actor.loss_scale != 1.0:
            self.space.scale(1.0 / self.actor.loss_scale)
        return [None if grad is None else local_shard(grad).cpu() for grad in self.space.take()]


def add_up(total: Gradient | None, part: Gradient) -> Gradient:
    """Add a part to a running total, in place; the first part is copied."""
    if total is None:
        return [None if grad is None else grad.clone() for grad in part]
    for index, grad in enumerate(part):
        if grad is None:
            continue
        if total[index] is None:
            total[index] = grad.clone()
        else:
            total[index].add_(grad)
    return total
