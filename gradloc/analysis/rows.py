# SPDX-License-Identifier: Apache-2.0
"""Gradients of weighted sums over chosen rows of a batch, wherever these rows live.

The rows are run together whatever micro-batches they came from, cut into runs that fit where training's micro-batches
fit. Ranks hold unequal parts of a choice: one that has run out of rows runs a row with zero weight, because its peers'
collectives wait for it.

Shapes: R rows on this rank, T response positions.
"""

from dataclasses import dataclass

import torch

from ..core.gradients import Gradient, GradientSpace
from ..core.ranks import Ranks
from ..core.sharding import local_shard
from .actor import Actor, Rows, pick_rows


@dataclass
class Weights:
    """The factor of each log-prob and of each entropy in the sum, both (R, T); None: not part of it."""

    log_prob: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def of(self, rows: list[int], is_silent: bool) -> "Weights":
        """Those of some rows; all zero where the rows are run only for the collectives of peers."""

        def pick(weights: torch.Tensor | None) -> torch.Tensor | None:
            if weights is None:
                return None
            return torch.zeros_like(weights[rows]) if is_silent else weights[rows]

        return Weights(pick(self.log_prob), pick(self.entropy))


class RowProbe:
    """What every analysis does on one rank; every rank makes the same calls in the same order.

    Args:
        actor: whose gradient it is.
        ranks: the data-parallel ranks.
        space: the actor's parameters; ``.grad`` is scratch space.
    """

    def __init__(self, actor: Actor, ranks: Ranks, space: GradientSpace):
        self.actor, self.ranks, self.space = actor, ranks, space
        self.num_forwards = self.num_backwards = 0

    def _hold(self, rows: Rows) -> None:
        self._rows = rows
        self._lengths = rows["attention_mask"].sum(-1)
        self._filler = int(self._lengths.argmin())

    def _chunks(self, chosen: torch.Tensor) -> list[list[int]]:
        """Cut the chosen rows, bool (R,), into runs that fit where training's micro-batches fit, longest first."""
        rows = chosen.nonzero().flatten()
        rows = rows[self._lengths[rows].argsort(descending=True, stable=True)]
        return [rows[run].tolist() for run in self.actor.runs(self._lengths[rows])]

    def _gradient(self, weights: Weights, chunks: list[list[int]], num_chunks: int) -> Gradient:
        """The gradient of the weighted sum over some rows, moved to host memory.

        Args:
            weights: of all of this rank's rows.
            chunks: this rank's rows, in runs.
            num_chunks: the most chunks that any rank has.
        """
        self.space.clear()
        for index in range(num_chunks):
            self._backward(weights, chunks[index] if index < len(chunks) else None)
        return self._take()

    def _take(self) -> Gradient:
        """Move what is in ``.grad`` to host memory, in the scale of the loss."""
        if self.actor.loss_scale != 1.0:
            self.space.scale(1.0 / self.actor.loss_scale)
        return [None if grad is None else local_shard(grad).cpu() for grad in self.space.take()]

    def _backward(self, weights: Weights, rows: list[int] | None) -> None:
        self.num_forwards += 1
        self.num_backwards += 1
        chosen = [self._filler] if rows is None else rows
        inputs = pick_rows(self._rows, chosen, self.actor.device)
        log_prob, entropy = self.actor.forward(inputs, with_entropy=weights.entropy is not None)
        mine = weights.of(chosen, is_silent=rows is None)
        pairs = [(log_prob, mine.log_prob), (entropy, mine.entropy)]
        total = sum((values * factors).sum() for values, factors in pairs if factors is not None)
        (total * self.actor.loss_scale).backward()


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
