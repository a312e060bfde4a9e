# SPDX-License-Identifier: Apache-2.0
"""What every strategy is given (:class:`Task`) and returns (:class:`SearchResult`)."""

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

_MICRO_BATCHES = 16  # the published budget is enough for this many
_LEAST_SECONDS = 2.0  # an update counts as at least this long: on a toy model all is overhead, and no time is lost
_SHARE_OF_THRESHOLD = 0.25
"""A culprit has at least this part of the threshold. The largest healthy token has far less, and a token that alone
lifts a healthy norm over the threshold has far more."""


class Limit:
    """What a search may cost: some of this run's own updates, in passes and in time, or the published budget.

    Costs are in f, a forward of one micro-batch; an update of M micro-batches is 3 M f.

    Args:
        num_micro_batches: M.
        max_steps: updates, at least 1.
        update_seconds: how long an update of this run takes; None if that is unknown, as in a replay.
        budget: the published bisection's, in probes, in proportion more beyond 16 micro-batches; None for others.
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
        """What may still be spent, in f. All ranks ask together, and the slowest one's clock counts.

        Args:
            prober: whose cost counts.
            certificate: f kept back for the certificate; the published budget does not count that.
        """
        spent = float(prober.cost)
        if self._seconds is not None:
            (elapsed,) = prober.ranks.max([time.perf_counter() - self._started])
            spent = max(spent, elapsed / self._seconds * self._update)
        return self._most - spent - (0 if self._is_published else certificate)


@dataclass(frozen=True)
class Task:
    """One spike to search; the same for all strategies."""

    prober: Prober
    gradient: Gradient
    """The training gradient, set aside: ``scale`` times the true one."""
    scale: float
    """What clipping left of it, in (0, 1]."""
    spike: Spike
    tau: float
    """The published threshold per token; only ``bisect`` uses it."""
    max_culprits: int
    limit: Limit
    increments: list[float] | None = None
    """About the norm of each micro-batch's own gradient, over all ranks; None if it was not tracked."""
    broken: int | None = None
    """A micro-batch whose gradient is known not to be finite; None if none is known."""

    @property
    def reference(self) -> float:
        """The threshold on the norm; without one, on a rehearsal, the step's own norm."""
        return self.spike.threshold if self.spike.threshold is not None else self.spike.grad_norm

    @property
    def culprit_norm(self) -> float:
        """The least norm of a culprit's gradient."""
        return _SHARE_OF_THRESHOLD * self.reference

    def suspects(self) -> list[int]:
        """Micro-batches whose own gradient seems as large as a culprit's, largest first; all of them if none does."""
        sizes = self.increments or [0.0] * self.prober.step.num_micro_batches
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        return [index for index in order if sizes[index] >= self.culprit_norm] or order

    def can_afford(self, forwards: int = 0, backwards: int = 0, is_certificate: bool = False) -> bool:
        """Whether this much more stays within the limit; the same on every rank.

        A pass over all micro-batches is kept back for the certificate, unless ``is_certificate``: this is it, or none
        will follow. A backward counts with its forward, as one probe.
        """
        certificate = 0 if is_certificate else 3 * self.prober.step.num_micro_batches
        return forwards + 3 * backwards <= self.limit.left(self.prober, certificate)

    @property
    def affordable_forwards(self) -> int:
        """How many forwards of a micro-batch stay within the limit; the same on every rank."""
        left = self.limit.left(self.prober, 3 * self.prober.step.num_micro_batches)
        return int(min(max(left, 0), 10**9))

    def certify(self, culprits: list[Token], alone: Gradient | None = None, goes_on: bool = False) -> Certificate:
        """The norm without these tokens; arguments and ``.grad`` as in :func:`..core.certificate.certify`."""

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
        """One :class:`.Readout` for each of this rank's micro-batches; tokens already named read 0."""
        is_half = self.prober.step.numerics.dtype != torch.float32
        recorded = self.prober.step.recorded
        return [Readout(recorded(i), *found, is_half) for i, found in enumerate(self.coefficients(without))]

    def coefficients(self, without: list[Token]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """c_t and e_t (B, T) of each of this rank's micro-batches, 0 for tokens already named."""
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
    """A culprit: one or more tokens of one row whose gradient is large."""

    span: str
    """``token``, ``segment`` or ``sequence``."""
    tokens: tuple[Token, ...]
    norm: float
    """L2 norm of the span's gradient; a lower bound unless ``is_exact``. NaN if that gradient is not finite."""
    threshold: float
    """The norm, or bound, that made it a culprit."""
    is_exact: bool
    """Whether ``norm`` was measured, and is not a bound."""
    share: float | None = None
    """<g, G> / ||G||^2; None unless measured."""
    squares: torch.Tensor | None = None
    """Squared norm per parameter, float64 (num_params,); None unless measured."""


@dataclass
class SearchResult:
    """What a strategy found, and its path. The same on every rank except for ``shares``."""

    culprits: list[CulpritSpan] = field(default_factory=list)
    path: list[PathEntry] = field(default_factory=list)
    stop_reason: str = ""
    exhausted: bool = False
    """Whether the limit ended the search."""
    certificate: Certificate | None = None
    """None if the strategy did not certify; :func:`.find.localize` then does."""
    shares: ShareMap | None = None
    """Shares along the spike's own gradient, of this rank's tokens."""
    is_cut: bool = False
    """Whether ``max_culprits`` ended the search while the rest still spikes."""
    num_more: int = 0
    """At least this many more spans are as large as a culprit."""
    more_norm: float | None = None
    """Lower bound on the norm of all of these together; None without any."""
    source: StepCause | None = None
    """What made the spike, if its tokens did not."""

    @property
    def tokens(self) -> list[Token]:
        return [token for culprit in self.culprits for token in culprit.tokens]


def verify(task: Task, span: str, tokens: tuple[Token, ...], threshold: float) -> CulpritSpan:
    """Measure a span's gradient by a backward of its own (one probe), which leaves it in ``.grad``."""
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
    """The culprit whose gradient is in ``.grad`` now, with its norm and share."""
    space = task.prober.space
    squares, dots = space.squares_and_dots(task.gradient)
    square = task.spike.grad_norm**2
    dot = sum(dots.tolist()) / task.scale
    share = dot / square if 0 < square < float("inf") else None
    return CulpritSpan(span, tokens, sum(squares.tolist()) ** 0.5, threshold, True, share, squares)
