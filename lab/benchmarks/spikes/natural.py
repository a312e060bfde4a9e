# SPDX-License-Identifier: Apache-2.0
"""Natural spikes, with nothing planted: runs under a setting that is known to make them.

The truth is measured by running the step again: with the batch of the step before, with the last update undone, and
without some of its rows. What takes the spike away is at fault. A new kind is a subclass of :class:`Natural`, listed in
:data:`NATURAL`.

Shapes: B rows of a micro-batch, T positions of a row.
"""

import copy
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lab.benchmarks.links import HEALTHY, Plan, losses_of
from lab.benchmarks.spikes.collection import TIMES, Kind, Row, Truth

STEPS = 160
"""Steps of a run that does not spike earlier."""
_RECENT = 32  # steps whose median norm is the usual one
_LAG = 8  # steps between a rollout and its use, where it is stale
Batch = list[tuple[torch.Tensor, torch.Tensor]]
"""A step's micro-batches: token ids (B, T + 1) and weights (B, T), or several (N, B, T) that a kind needs."""


class Natural(Kind):
    """A run under a setting that makes spikes, with nothing planted."""

    num_rows = 0
    rate_times = 1.0
    """The learning rate, over the plan's."""

    def __init__(self, plan: Plan, is_faulty: bool = False, folder: str = "", **given: object):
        super().__init__(plan, False, folder, **given)
        for group in self.optimizer.param_groups:
            group["lr"] *= self.rate_times

    def norm_of(self, batch: Batch) -> float:
        """Return the gradient's norm of a batch at the present weights."""
        self.backward(iter(batch))
        return self.norm()


class HighRate(Natural):
    """The learning rate is sixty times the sound one, and there is no warm-up."""

    rate_times = 60.0


class WithoutNorms(Natural):
    """A model whose layers do not normalise their inputs, at five times the rate."""

    rate_times = 5.0

    def wrapped(self, model: nn.Module) -> nn.Module:
        for module in [*model.modules()]:
            for name, child in module.named_children():
                if "norm" in type(child).__name__.lower():
                    setattr(module, name, nn.Identity())
        return model


class SortedData(Natural):
    """Easy documents come first, those with the whole alphabet after them."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        is_easy = self.step < HEALTHY + self.plan.seed % 40
        for ids, weights in super().batches():
            yield (ids // 32 if is_easy else ids), weights


class HeavyTails(Natural):
    """Rewards without a bound: the advantages of rows are drawn from Student's t with two degrees of freedom."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids, weights in super().batches():
            normal = torch.randn(3, len(ids), 1, generator=self.rng)
            yield ids, weights * normal[0] / normal[1:].square().mean(0).sqrt()


class Damaged(Natural):
    """A row in a hundred is noise: a binary file among the documents."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids, weights in super().batches():
            is_noise = torch.rand(len(ids), 1, generator=self.rng) < 0.01
            yield torch.where(is_noise, torch.randint(256, ids.shape, generator=self.rng), ids), weights


class Lagging(Natural):
    """Rollouts are of the policy of eight steps before, at ten times the rate, and nothing clips importance ratios."""

    rate_times = 10.0
    past: tuple[dict[str, torch.Tensor], ...] = ()
    """The weights of the steps since the rollouts' policy, oldest first."""

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.past = (*self.past, copy.deepcopy(self.model.state_dict()))[-_LAG - 1 :]
        for ids, weights in super().batches():
            with torch.no_grad():
                old = -losses_of(torch.func.functional_call(self.model, self.past[0], (ids[:, :-1],)), ids)
            yield ids, torch.stack([weights * torch.randn(len(ids), 1, generator=self.rng), old])

    def backward(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().backward(batches)
        self.weights = [both[0] for both in self.weights]

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        advantages, old = weights
        return -(-losses_of(given, ids) - old).exp() * advantages


NATURAL: dict[str, type[Natural]] = {
    "high learning rate": HighRate,
    "no normalisation": WithoutNorms,
    "sorted data": SortedData,
    "heavy-tailed rewards": HeavyTails,
    "damaged documents": Damaged,
    "lagging rollouts": Lagging,
}
"""The natural kinds, by name."""


def first_spike(norms: list[float]) -> int | None:
    """Return the index of the first norm that is :data:`TIMES` times the median of those before; None without one."""
    for index in range(HEALTHY, len(norms)):
        if not norms[index] < TIMES * statistics.median(norms[index - _RECENT : index]):
            return index
    return None


def measured_truth(kind: str, plan: Plan, spike: int) -> Truth:
    """Return what takes a spike away, by running it again."""
    run, norms = NATURAL[kind](plan), list[float]()
    before: dict[str, torch.Tensor] = {}
    last: Batch = []
    for step in range(spike):
        if step == spike - 1:
            before, last = copy.deepcopy(run.model.state_dict()), [*run.batches()]
            run.batches = partial(iter, last)  # type: ignore[method-assign]
        norms.append(run.take())
    del run.batches
    batch, most = [*run.batches()], TIMES * statistics.median(norms[-_RECENT:])
    rows, involved = _rows_at_fault(run, batch, most)
    is_batch = run.norm_of(last) < most
    run.model.load_state_dict(before)
    is_update = run.norm_of(batch) < most
    healed = [link for link, is_at_fault in (("batch", is_batch), ("last_update", is_update)) if is_at_fault]
    found = frozenset(healed or ["weights"])
    return Truth(found, rows if is_batch else frozenset(), involved=involved if is_batch else frozenset())


def _rows_at_fault(run: Natural, batch: Batch, most: float) -> tuple[frozenset[Row], frozenset[Row]]:
    """Return the rows at fault, and those involved.

    At fault are the loudest rows without which the norm is ordinary; none where these are more than half. Involved is
    each row without which alone the norm is lower by a tenth or more.
    """

    def without(rows: list[Row]) -> float:
        kept = [(ids, weights.clone()) for ids, weights in batch]
        for number, row in rows:
            kept[number][1][..., row, :].mul_(0.0)
        return run.norm_of(kept)

    norms = {
        (number, row): without([(number, row)]) for number, (ids, _) in enumerate(batch) for row in range(len(ids))
    }
    order, whole = sorted(norms, key=norms.__getitem__), without([])
    involved = frozenset(row for row in order if not norms[row] > 0.9 * whole)
    for count in range(1, len(order) // 2 + 1):
        if without(order[:count]) < most:
            return frozenset(order[:count]), involved
    return frozenset(), involved
