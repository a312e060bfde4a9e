# SPDX-License-Identifier: Apache-2.0
"""The spikes: small runs, each with one fault of a known link, parameter or row.

A spike is a kind, a model and a seed. The truth is counterfactual: the same run without the fault has an ordinary norm
at that step. A new kind is a subclass of :class:`Kind`, listed in :data:`KINDS`: docs/peers.md has an example.

Shapes: B rows of a micro-batch, T positions of a row.
"""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lab.benchmarks.links import FAULTS, HEALTHY, Plan, Run, losses_of

AFTER = 6
"""Steps of a run from the first faulty one on."""
TIMES = 4.0
"""A norm counts as a spike from this many times the usual norm on, and this many times the norm without the fault."""
Row = tuple[int, int]
"""A micro-batch and a row in it."""


@dataclass(frozen=True)
class Truth:
    """Where a fault is: the links, rows, position and parameter that are right answers."""

    links: frozenset[str]
    """The links that are right answers; an update's fault that lasts is one of the weights as well."""
    rows: frozenset[Row] = frozenset()
    """The faulty rows; empty where no row or every row is at fault."""
    position: int | None = None
    """The faulty position in those rows; None for all of them."""
    parameter: str = ""
    """The faulty parameter; empty for none or all."""
    is_everywhere: bool = False
    """Whether all rows are at fault, so that naming none is right as well."""
    involved: frozenset[Row] = frozenset()
    """Further rows that are not innocent."""


class Kind(Run):
    """A run whose loss is the weighted sum of its tokens' losses, with a fault in some of its rows.

    A subclass says which rows are spoiled, and how: by the tokens, their weights, or the loss itself.
    """

    link = "batch"
    num_rows = 1
    position: int | None = None

    def __init__(self, plan: Plan, is_faulty: bool, folder: str = "", **given: object):
        super().__init__(plan, "", False, folder, **given)
        self.is_faulty = is_faulty
        self.losses: list[torch.Tensor] = []
        """Each micro-batch's token losses (B, T) of the last backward."""
        self.weights: list[torch.Tensor] = []
        """Each micro-batch's weights (B, T): the advantages of an RL run."""
        self.norms: list[float] = []
        """The gradient's norm at each step, before clipping."""
        self.observers: list[Callable[[Kind, float], None]] = []
        """Called between backward and clipping, with the run and the norm."""

    @property
    def is_spoiled(self) -> bool:
        return self.is_faulty and self.step == HEALTHY

    @property
    def rows(self) -> range:
        return range(min(self.num_rows, self.plan.rows))

    @property
    def truth(self) -> Truth:
        last = self.plan.micro_batches - 1
        rows = frozenset((last, row) for row in self.rows) if self.link == "batch" and self.num_rows else frozenset()
        num_rows = self.plan.micro_batches * self.plan.rows
        return Truth(frozenset({self.link}), rows, self.position, is_everywhere=len(rows) == num_rows)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, (ids, weights) in enumerate(super().batches()):
            if self.is_spoiled and number == self.plan.micro_batches - 1:
                self.spoil(ids, weights)
            yield ids, weights

    def spoil(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Change tokens (B, T + 1) or weights (B, T) of the faulty micro-batch in place."""

    def backward(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.losses, self.weights = [], []
        super().backward(batches)

    def losses_of(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_last: bool) -> torch.Tensor:
        losses = self.spoiled_losses(given, ids, weights, is_last and self.is_spoiled)
        self.losses.append(losses.detach())
        self.weights.append(weights)
        return losses

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        """Return the token losses (B, T) of a micro-batch, which ``is_faulty`` in the last one of the spike's step."""
        return losses_of(given, ids) * weights

    def before_clip(self) -> None:
        self.norms.append(self.norm())
        for observer in self.observers:
            observer(self, self.norms[-1])


class Token(Kind):
    """One token's weight, such as an advantage, is far too large."""

    position = 7

    def spoil(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        weights[0, self.position] = 3e3


class Rows(Kind):
    """One row's weight is far too large."""

    def spoil(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        weights[self.rows] = 300.0


class Group(Rows):
    """All answers to one prompt weigh far too much: a reward's error."""

    num_rows = 2


class Batch(Kind):
    """Every row weighs far too much."""

    num_rows = 0

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        return losses_of(given, ids) * weights * (40.0 if self.is_spoiled else 1.0)


class Ratio(Kind):
    """One row is off-policy, and nothing clips its importance ratio."""

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        log_probs = -losses_of(given, ids)
        old = log_probs.detach().clone()
        if is_faulty:
            old[0] -= 6.0
        return -(log_probs - old).exp() * weights


class NotFinite(Kind):
    """One token's log-prob of the rollout is minus infinity, so its ratio is infinite."""

    position = 7

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        factor = torch.ones_like(weights)
        if is_faulty:
            factor[0, self.position] = torch.inf
        return losses_of(given, ids) * weights * factor


class Link(Kind):
    """A fault of a link behind the loss, as :mod:`lab.benchmarks.links` plants it."""

    num_rows = 0
    fault_name = ""

    def __init__(self, plan: Plan, is_faulty: bool, folder: str = "", **given: object):
        super().__init__(plan, is_faulty, folder, **given)
        self.plant(self.fault_name, False)
        self.parameter = self.fault.parameter
        if not is_faulty:
            self.plant("", False)

    @property
    def truth(self) -> Truth:
        link = FAULTS[self.fault_name]
        return Truth(frozenset({link, "weights"} if link == "last_update" else {link}), parameter=self.parameter)


class Router(Kind):
    """A mixture of experts whose balancing loss, which passes through no token, weighs far too much."""

    num_rows = 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        self.experts = [Experts(block.up.in_features) for block in model.blocks]
        for block, experts in zip(model.blocks, self.experts, strict=True):
            block.up, block.down = experts, nn.Identity()
        return model

    @property
    def truth(self) -> Truth:
        return Truth(frozenset({"batch"}), parameter="blocks.0.up.router.weight")

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        balance = sum(experts.imbalance for experts in self.experts)
        return losses_of(given, ids) * weights + balance * (100.0 if self.is_spoiled else 1e-3)


class Experts(nn.Module):
    """Four experts of one hidden layer, mixed by a softmax over a router's outputs.

    Args:
        width: of the input and the output.
    """

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)  # (B, T, 4)
        self.imbalance = 4 * gates.mean((0, 1)).square().sum()
        hidden = F.gelu(torch.einsum("bth,ehf->btef", x, self.up))
        return torch.einsum("btef,efh,bte->bth", hidden, self.down, gates)


class Stale(Kind):
    """Every row is of the policy that the run began with, and nothing clips the importance ratios."""

    num_rows = 0

    def __init__(self, plan: Plan, is_faulty: bool, folder: str = "", **given: object):
        super().__init__(plan, is_faulty, folder, **given)
        self.first = copy.deepcopy(self.model.state_dict())

    @property
    def truth(self) -> Truth:
        numbers = itertools.product(range(self.plan.micro_batches), range(self.plan.rows))
        return Truth(frozenset({"batch"}), frozenset(numbers), is_everywhere=True)

    def spoiled_losses(self, given: Any, ids: torch.Tensor, weights: torch.Tensor, is_faulty: bool) -> torch.Tensor:
        losses = losses_of(given, ids)
        if not self.is_spoiled:
            return losses * weights
        with torch.no_grad():
            old = losses_of(torch.func.functional_call(self.model, self.first, (ids[:, :-1],)), ids)
        return -(old - losses).exp() * weights


def _link(name: str) -> type[Link]:
    return type(name, (Link,), {"fault_name": name, "__doc__": f"The fault {name} of lab.benchmarks.links."})


KINDS: dict[str, type[Kind]] = {
    "token": Token,
    "row": Rows,
    "group": Group,
    "whole batch": Batch,
    "off-policy ratio": Ratio,
    "stale rollouts": Stale,
    "not finite": NotFinite,
    "router": Router,
    **{name.replace("_", " "): _link(name) for name, link in FAULTS.items() if link != "batch"},
}
"""The collection's kinds, by name."""


def models_of(kind: str) -> tuple[str, ...]:
    """Return the models that a kind runs on."""
    return ("gpt",) if kind == "router" else ("gpt", "llama")


def spike_of(faulty: list[float], healthy: list[float]) -> int | None:
    """Return the index of the first norm that is a spike; None without one.

    Args:
        faulty: norms of the run with the fault.
        healthy: norms of the same run without it; the first :data:`HEALTHY` say what is usual.
    """
    usual = statistics.median(healthy[:HEALTHY])
    for index in range(min(len(faulty), len(healthy))):
        other = max(usual, healthy[index])
        if not faulty[index] <= TIMES * other and index >= HEALTHY // 2:
            return index
    return None
