# SPDX-License-Identifier: Apache-2.0
"""What every search strategy is given, and what it returns."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..core.certificate import certify
from ..core.gradients import Gradient
from ..core.probe import Prober
from ..core.selection import Token
from ..core.trigger import Spike
from ..record import Certificate, PathEntry, StepCause
from .readout import Readout
from .share import ShareMap

_MICRO_BATCHES = 16  # the published budget is meant for up to so many
_LEAST_SECONDS = 2.0  # an update counts as at least this long: on a toy model all is overhead, and nothing stalls
_SHARE_OF_THRESHOLD = 0.25
"""A culprit carries at least this part of the norm that counts as a spike. The largest healthy token carries far less:
one that alone lifts a healthy norm over the threshold carries far more."""


class Limit:
    """What a search may cost: so many of this run's own updates, in passes and in time, or the published budget.

    Args:
        num_micro_batches: of the step.
        max_steps: updates, a forward and backward of each micro-batch; at least 1.
        update_seconds: how long this run's own take; None where there is none, as in a replay.
        budget: of the published bisection, in probes, for up to 16 micro-batches, of more as many times more; None for
            any other search.
    """

    def __init__(
        self, num_micro_batches: int, max_steps: float, update_seconds: float | None = None, budget: int | None = None
    ):
        self._update = 3 * num_micro_batches
        self._seconds = None if budget or not update_seconds else max(update_seconds, _LEAST_SECONDS)
        self._most = max_steps * self._update
        self.words = f"what search.max_steps={max_steps:g} allows is spent"
        if budget:
            self._most = 3 * budget * max(1.0, num_micro_batches / _MICRO_BATCHES)
            self.words = f"the budget of {budget} probes was used up"
        self._is_published = budget is not None
        self._started = time.perf_counter()

    def left(self, prober: Prober, certificate: int) -> float:
        """What may still be spent, in forwards of a micro-batch: all ranks ask together, and the slowest one answers.

        The published budget does not count the certificate that comes after it.
        """
        spent = float(prober.cost)
        if self._seconds is not None:
            (elapsed,) = prober.ranks.max([time.perf_counter() - self._started])
            spent = max(spent, elapsed / self._seconds * self._update)
        return self._most - spent - (0 if self._is_published else certificate)


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
    max_culprits: int
    limit: Limit
    increments: list[float] | None = None
    """Estimate of each micro-batch's own gradient norm over all ranks; None when it was not tracked."""
    broken: int | None = None
    """A micro-batch whose gradient is known not to be finite; None where nobody knows of one."""

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

    def can_afford(self, forwards: int = 0, backwards: int = 0, is_certificate: bool = False) -> bool:
        """Whether this much more stays within the limit, with a pass for the certificate beside it; the same on every
        rank. A backward (with its forward) is one probe.
        """
        certificate = 0 if is_certificate else 3 * self.prober.step.num_micro_batches
        return forwards + 3 * backwards <= self.limit.left(self.prober, certificate)

    @property
    def affordable_forwards(self) -> int:
        """How many forwards of a micro-batch are within the limit; the same on every rank."""
        left = self.limit.left(self.prober, 3 * self.prober.step.num_micro_batches)
        return int(min(max(left, 0), 10**9))

    def certify(self, culprits: list[Token], alone: Gradient | None = None, goes_on: bool = False) -> Certificate:
        """What the norm is without these tokens, see :func:`~..core.certificate.certify`."""

        def can_afford(num_probes: int) -> bool:
            return self.can_afford(backwards=num_probes, is_certificate=True)

        spike = self.spike
        return certify(
            self.prober,
            self.gradient,
            self.scale,
            spike.grad_norm,
            spike.threshold,
            culprits,
            alone,
            can_afford,
            goes_on,
        )

    def readouts(self, without: list[Token]) -> list[Readout]:
        """How this rank's micro-batches are read; tokens already named read 0."""
        is_half = self.prober.step.compute_dtype != torch.float32
        recorded = self.prober.step.recorded
        return [Readout(recorded(i), *found, is_half) for i, found in enumerate(self.coefficients(without))]

    def coefficients(self, without: list[Token]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """d step loss / d log_prob and d entropy (B, T) of this rank's tokens, zeroed for the ones already named."""
        step, rank = self.prober.step, self.prober.ranks.rank
        found = []
        for index in range(step.num_micro_batches):
            log_prob, entropy = step.coefficients(index)
            positions = [token.index for token in without if (token.micro_batch, token.rank) == (index, rank)]
            if positions:
                where = step.token_mask(index).flatten().nonzero().squeeze(-1)[positions]
                log_prob = log_prob.flatten().index_fill(0, where, 0.0).view_as(log_prob)
                if entropy is not None:
                    entropy = entropy.flatten().index_fill(0, where, 0.0).view_as(entropy)
            found.append((log_prob, entropy))
        return found


@dataclass
class CulpritSpan:
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

    culprits: list[CulpritSpan] = field(default_factory=list)
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
    """At least so many spans beyond that number are as large as a culprit."""
    more_norm: float | None = None
    """Lower bound on the norm of all of these together; None without any."""
    source: StepCause | None = None
    """Where the spike comes from, when that is not its tokens."""

    @property
    def tokens(self) -> list[Token]:
        return [token for culprit in self.culprits for token in culprit.tokens]


def verify(task: Task, span: str, tokens: tuple[Token, ...], threshold: float) -> CulpritSpan:
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


def measured_culprit(task: Task, span: str, tokens: tuple[Token, ...], threshold: float) -> CulpritSpan:
    """The culprit whose gradient is in ``.grad`` right now."""
    space = task.prober.space
    squares, dots = space.squares_and_dots(task.gradient)
    square = task.spike.grad_norm**2
    dot = sum(dots.tolist()) / task.scale
    share = dot / square if 0 < square < float("inf") else None
    return CulpritSpan(span, tokens, sum(squares.tolist()) ** 0.5, threshold, True, share, squares)
