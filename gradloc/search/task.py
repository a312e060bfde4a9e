# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What every search strategy is given, and what it returns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..core.certificate import Certificate
from ..core.gradients import Gradient
from ..core.probe import Prober
from ..core.selection import Part, Token
from ..core.trigger import Spike
from .share import Coefficients, ShareMap

__all__ = ["Culprit", "PathEntry", "SearchResult", "Source", "Task", "verify"]

_MICRO_BATCHES = 16  # the budget is meant for up to so many
_SHARE_OF_THRESHOLD = 0.25
"""A culprit carries at least this part of the norm that counts as a spike. The largest healthy token carries far less:
one that alone lifts a healthy norm over the threshold carries far more."""


@dataclass(frozen=True)
class Task:
    """One spike to look into; the same for all strategies."""

    prober: Prober
    gradient: Gradient
    """The training gradient, set aside; holds ``scale`` times the true one."""
    scale: float
    spike: Spike
    tau: float
    """Per-token threshold of the published rule."""
    budget: int
    """Largest number of probes, one forward and backward (3 forwards' worth) of one micro-batch each, for up to 16
    micro-batches; of more, as many times more: every method looks at all of them."""
    max_culprits: int
    increments: list[float] | None = None
    """Estimate of each micro-batch's own gradient norm over all ranks; None when it was not tracked."""

    @property
    def reference(self) -> float:
        """The norm from which a step counts as a spike; on a rehearsal, the norm it has."""
        return self.spike.threshold if self.spike.threshold is not None else self.spike.grad_norm

    @property
    def culprit_norm(self) -> float:
        """How large the gradient of a single culprit is at least."""
        return _SHARE_OF_THRESHOLD * self.reference

    def suspects(self) -> list[int]:
        """Micro-batches whose own gradient seems to be a culprit's worth, largest first; all of them where none is."""
        sizes = self.increments or [0.0] * self.prober.step.num_micro_batches
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        return [index for index in order if sizes[index] >= self.culprit_norm] or order

    def can_afford(self, forwards: int = 0, backwards: int = 0) -> bool:
        """Whether this much more stays within the budget; a backward (with its forward) is one probe."""
        cost = self.prober.cost + forwards + 3 * backwards
        return cost <= 3 * self.budget * max(1.0, self.prober.step.num_micro_batches / _MICRO_BATCHES)

    def coefficients(self, without: list[Token]) -> list[Coefficients]:
        """The recorded coefficients of this rank's tokens, zeroed for the ones already named."""
        step, rank = self.prober.step, self.prober.ranks.rank
        found = []
        for index in range(step.num_micro_batches):
            log_prob, entropy = step.coefficients(index)
            positions = [token.index for token in without if (token.micro_batch, token.rank) == (index, rank)]
            if positions:
                where = step.token_mask(index).flatten().nonzero().squeeze(-1)[positions]
                log_prob = log_prob.clone()
                log_prob.view(-1)[where] = 0.0
                if entropy is not None:
                    entropy = entropy.clone()
                    entropy.view(-1)[where] = 0.0
            found.append(Coefficients(log_prob, entropy))
        return found


@dataclass(frozen=True)
class Source:
    """What makes a spike, or a part of it, that no tokens make; the same on every rank."""

    label: str
    """One of ``evidence.record.CAUSES``."""
    reason: str
    """Follows "the search stopped because"."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Parameters, most suspect first."""
    places: tuple[tuple[int | None, int], ...] = ()
    """(row of the driver's batch, response position)"""


@dataclass
class PathEntry:
    """One stage or probe of a search and what came of it."""

    phase: str
    verdict: str
    part: Part | None = None
    num_tokens: int | None = None
    norm: float | None = None
    threshold: float | None = None
    note: str | None = None


@dataclass
class Culprit:
    """A span of tokens of one rank's micro-batch whose gradient is large."""

    span: str
    """``token``, ``segment`` or ``sequence``."""
    tokens: tuple[Token, ...]
    norm: float
    """L2 norm of the span's part of the gradient; a lower bound unless ``is_exact``."""
    threshold: float
    is_exact: bool
    share: float | None = None
    """<g, G> / ||G||^2"""
    squares: torch.Tensor | None = None
    """Squared norm per parameter, float64 (num_params,); None unless ``is_exact``."""


@dataclass
class SearchResult:
    """What a strategy found, and the way it went. The same on every rank but for ``shares``."""

    culprits: list[Culprit] = field(default_factory=list)
    path: list[PathEntry] = field(default_factory=list)
    stop_reason: str = ""
    exhausted: bool = False
    """Whether the budget ended the search."""
    certificate: Certificate | None = None
    """Where the strategy certifies as it goes."""
    shares: ShareMap | None = None
    """Shares along the spike gradient itself: this rank's tokens."""
    is_cut: bool = False
    """Whether the largest number of culprits ended the search while the rest still spikes."""
    num_more: int = 0
    """Spans beyond that number that are a culprit's worth, at least."""
    more_norm: float | None = None
    """Lower bound on the norm of all of these together; None without any."""
    source: Source | None = None
    """Where the spike comes from, when that is not its tokens."""

    @property
    def tokens(self) -> list[Token]:
        return [token for culprit in self.culprits for token in culprit.tokens]


def verify(task: Task, span: str, tokens: tuple[Token, ...], threshold: float) -> Culprit:
    """Measure a span's gradient by a backward of its own: one probe."""
    prober = task.prober
    micro_batch, rank = tokens[0].micro_batch, tokens[0].rank

    def select() -> Iterator[tuple[int, torch.Tensor]]:
        mask = prober.step.token_mask(micro_batch)
        selected = torch.zeros_like(mask)
        if rank == prober.ranks.rank:
            positions = mask.flatten().nonzero().squeeze(-1)[[token.index for token in tokens]]
            selected.view(-1)[positions] = True
        yield micro_batch, selected

    prober.compute(select())
    return measured_culprit(task, span, tokens, threshold)


def measured_culprit(task: Task, span: str, tokens: tuple[Token, ...], threshold: float) -> Culprit:
    """The culprit whose gradient is in ``.grad`` right now."""
    space = task.prober.space
    squares = space.squares()
    square = task.spike.grad_norm**2
    dot = sum(space.dots(space.current(), task.gradient).tolist()) / task.scale
    share = dot / square if 0 < square < float("inf") else None
    return Culprit(span, tokens, sum(squares.tolist()) ** 0.5, threshold, True, share, squares)
