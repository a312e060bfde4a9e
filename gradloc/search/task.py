# SPDX-License-Identifier: Apache-2.0
"""The input of every strategy (:class:`Task`) and its output (:class:`SearchResult`)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.certificate import Removal
from ..core.gradients import Gradient
from ..core.probe import Prober
from ..core.selection import Token
from ..core.step import only
from ..record import Certificate, Cured, Fault, FirstNotFinite, PathEntry, Rerun, StepCause
from ..trigger import Spike
from .limit import PROBE, Limit
from .share import Readout, ShareMap

CULPRIT_SHARE = 0.25
"""A culprit's norm is at least this part of the threshold. The largest healthy token has far less, and a token that
alone lifts a healthy norm over the threshold has far more."""


@dataclass(frozen=True)
class Task:
    """One spike to search; the same for all strategies."""

    prober: Prober
    gradient: Gradient
    """The training gradient, set aside: ``scale`` times the true one."""
    scale: float
    """The factor that clipping applied, in (0, 1]."""
    spike: Spike
    tau: float
    """The published threshold per token; only ``bisect`` uses it."""
    max_culprits: int
    limit: Limit
    increments: list[float] | None = None
    """An estimate of the norm of each micro-batch's own gradient, over all ranks; None if it was not tracked."""
    broken: int | None = None
    """A micro-batch whose gradient is known not to be finite; None if none is known."""
    reran: Rerun | None = None
    """The spike run again; None unless that was asked for."""
    usual_coefficient: tuple[float, float] | None = None
    """The median |d loss / d log_prob| of the run's batches, and which multiple of it is unusual; None if unknown."""
    square: float | None = None
    """Squared norm of the gradient before clipping; None where it was not measured."""
    unit: float = 1.0
    """All norms here are the step's divided by this; other than 1 in :class:`.overflow.RescaledTask`."""

    @property
    def reference(self) -> float:
        """The threshold on the norm; without one, on a rehearsal, the step's own norm."""
        return self.spike.threshold if self.spike.threshold is not None else self.spike.grad_norm

    @property
    def culprit_norm(self) -> float:
        """The least norm of a culprit's gradient."""
        return CULPRIT_SHARE * self.reference

    def can_afford(
        self, forwards: int = 0, backwards: int = 0, is_certificate: bool = False, counts_time: bool = True
    ) -> bool:
        """Return whether this much more stays within the limit; the same on every rank.

        A pass over all micro-batches is kept back for the certificate, unless ``is_certificate``: this is it, or none
        will follow. A backward counts with its forward, as one probe. Without ``counts_time``, passes alone count.
        """
        certificate = 0 if is_certificate else PROBE * self.prober.step.num_micro_batches
        return forwards + PROBE * backwards <= self.limit.left(self.prober, certificate, counts_time)

    def certify(self, culprits: list[Token], goes_on: bool = False, **parts: Any) -> Certificate:
        """Measure the norm without these tokens; arguments and ``.grad`` as in
        :class:`..core.certificate.Removal`."""

        def can_afford(num_probes: int) -> bool:
            return self.can_afford(backwards=num_probes, is_certificate=True)

        norms = self.spike.grad_norm, self.spike.threshold
        removal = Removal(self.prober, self.gradient, self.scale, *norms, culprits, can_afford, **parts)
        return removal.certify(goes_on)

    def kept(self, without: Sequence["Span"], micro_batch: int) -> torch.Tensor:
        """Mark all positions of this rank's micro-batch but these spans' tokens, padding included: bool (B, T)."""
        mask = self.prober.step.token_mask(micro_batch)
        kept, positions = torch.ones_like(mask), mask.flatten().nonzero().squeeze(-1)
        for span in without:
            if (span.micro_batch, span.rank) == (micro_batch, self.prober.ranks.rank):
                kept.view(-1)[positions[span.start : span.end]] = False
        return kept

    def readouts(self, without: Sequence["Span"]) -> list[Readout]:
        """Make a :class:`.Readout` for each of this rank's micro-batches; tokens already named read 0."""
        recorded = self.prober.step.recorded
        return [Readout(recorded(i), *found) for i, found in enumerate(self.coefficients(without))]

    def coefficients(self, without: Sequence["Span"]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return c_t and e_t (B, T) of each of this rank's micro-batches, 0 for tokens already named."""
        step, found = self.prober.step, []
        for index in range(step.num_micro_batches):
            log_prob, entropy = step.coefficients(index)
            kept = self.kept(without, index)
            found.append((only(kept, log_prob), None if entropy is None else only(kept, entropy)))
        return found


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one row: a candidate, and a culprit once its norm is over a threshold."""

    norm: float
    """L2 norm of its gradient, or a lower bound unless ``is_exact``; 0 for a mere hint, which a backward has to verify.
    NaN if that gradient is not finite."""
    span: str
    """``token``, ``segment`` or ``sequence``."""
    micro_batch: int
    rank: int
    start: int
    """``index`` of its first token, see :class:`~..core.selection.Token`."""
    end: int
    """Exclusive."""
    is_exact: bool = False
    """Whether ``norm`` was measured."""
    threshold: float = math.nan
    """The threshold that the norm, or its bound, is over; NaN until it was compared."""
    share: float | None = None
    """<g, G> / ||G||^2; None unless measured."""
    squares: torch.Tensor | None = field(default=None, compare=False)
    """Squared norm per parameter, float64 (num_params,); None unless measured."""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(Token(self.micro_batch, self.rank, number) for number in range(self.start, self.end))


def tokens_of(spans: Iterable[Span]) -> list[Token]:
    """Return all tokens of these spans."""
    return [token for span in spans for token in span.tokens]


@dataclass
class SearchResult:
    """The findings of a search: a strategy fills the first part, :func:`.find.localize` the second.

    The same on every rank except for ``shares`` and ``entropies``.
    """

    culprits: list[Span] = field(default_factory=list)
    path: list[PathEntry] = field(default_factory=list)
    stop_reason: str = ""
    exhausted: bool = False
    """Whether the limit ended the search."""
    certificate: Certificate | None = None
    """None if the strategy did not certify; then ``localize`` does."""
    shares: ShareMap | None = None
    """Shares along the spike's own gradient, of this rank's tokens."""
    is_cut: bool = False
    """Whether ``max_culprits`` ended the search while the rest still spikes."""
    num_more: int = 0
    """At least this many more spans are as large as a culprit."""
    more_norm: float | None = None
    """Lower bound on the norm of all of these together; None without any."""
    rest: Gradient | None = None
    """The gradient without the culprits, where a certificate has left it; let go of when the search is over."""
    source: StepCause | None = None
    """The cause of the spike, if its tokens are not."""
    fault: Fault | None = None
    """The link of the step that broke; None where that was not asked."""
    strategy: str = ""
    tau: float = math.nan
    num_forwards: int = 0
    """Forwards of a micro-batch, without those of ``cures``, which count their own."""
    num_backwards: int = 0
    seconds: float = 0.0
    rerun: Rerun | None = None
    """The spike run again; None unless that was asked for."""
    first_not_finite: FirstNotFinite | None = None
    """The module where NaN or inf first appears; None if the gradient is finite or the loss itself is not."""
    cures: list[Cured] | None = None
    """Settings that were tried; None where none was to be."""
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)
    """Entropies (B, T) of this rank's tokens, in nats, by micro-batch with an unlikely culprit on any rank."""

    @property
    def tokens(self) -> list[Token]:
        """All tokens of all culprits."""
        return tokens_of(self.culprits)

    @property
    def status(self) -> str:
        """``found``, ``not_found``, or the limit that ended it: ``budget_exhausted`` or ``max_culprits``, either of
        which may come with culprits."""
        if self.exhausted or self.is_cut:
            return "budget_exhausted" if self.exhausted else "max_culprits"
        return "found" if self.culprits else "not_found"

    @property
    def healer(self) -> Cured | None:
        """The setting that heals the step; None where none that was measured does."""
        return next((cured for cured in self.cures or () if cured.verdict == "healed"), None)


def verify(task: Task, span: Span, threshold: float) -> Span:
    """Measure a span's gradient by a backward of its own (one probe), which leaves it in ``.grad``."""
    task.prober.compute_only(span.tokens, [span.micro_batch])
    return with_measured_norm(task, span, threshold)


def with_measured_norm(task: Task, span: Span, threshold: float) -> Span:
    """Return the span whose gradient is in ``.grad`` now, with its norm and share."""
    space = task.prober.space
    squares, dots, _ = space.reduce_all(lambda: [space.own_squares(), space.own_dots(space.current(), task.gradient)])
    return with_norm(task, span, threshold, squares, dots)


def with_norm(task: Task, span: Span, threshold: float, squares: torch.Tensor, dots: torch.Tensor) -> Span:
    """Return the span with its norm and share.

    Args:
        task: the spike.
        span: with a bound.
        threshold: the norm from which it is a culprit.
        squares: its gradient's squared norms by parameter, float64 (num_params,).
        dots: its gradient's inner products with the spike's, of the same shape.
    """
    dot, square = float(dots.sum()) / task.scale, task.spike.grad_norm**2
    share = dot / square if 0 < square < math.inf else None
    norm = sum(squares.tolist()) ** 0.5
    return replace(span, norm=norm, threshold=threshold, is_exact=True, share=share, squares=squares)
