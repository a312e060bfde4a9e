# SPDX-License-Identifier: Apache-2.0
"""Messages between the trainer and its ranks: a policy to all with each update, a report from each process after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.step import Groups
from ..record import History, Step
from ..trigger import Spike, spike_kind
from .actions import Outcome
from .gather import RawEvent


@dataclass(frozen=True)
class Policy:
    """The driver's message to every rank about one update; the ranks need no collective to agree on it."""

    global_step: int
    kind: str = "off"
    """``fixed`` or ``adaptive``; ``off`` where no spike is looked for, but something else needs to know."""
    num_tokens: Sequence[int] = ()
    """Response tokens over all ranks, per mini-batch."""
    thresholds: Sequence[float | None] = ()
    """Thresholds on the gradient norm, per optimizer step (epochs x mini-batches); None in the warm-up."""
    tau: Sequence[float | None] = ()
    """Per-token threshold, per optimizer step; None where there is no threshold."""
    max_events: int = 0
    """Spikes of this update that an event may be written of; the action applies to all."""
    force: bool = False
    """Localize the first mini-batch even when it does not spike."""
    history: Sequence[History] = ()
    """The statistics behind each adaptive threshold, for the record; empty under the fixed rule."""
    stage: str | None = None
    """The one of Lopti's two updates of the step; None for the only one."""
    typical: dict[str, tuple[float, float]] | None = None
    """Typical numbers of the run's own batches, by name: see :meth:`~..trigger.history.ScaleHistory.typical`."""
    groups: Groups | None = None
    """The making of the batch's advantages, for settings that change them; None where no spike needs it."""
    update: int = 0
    """The update's number in this run, by which a rank that sees one mini-batch at a time knows a new one."""
    settings: Any = None
    """The effective settings, see :func:`~..config.resolve`, for ranks whose own config has none."""
    learned: Any = None
    """The stabilizers' state, from a checkpoint; on the first update after a resume."""
    keeps_lr_schedule: bool = False
    """Whether another update of the same step follows, which is to have the same learning rate."""

    def threshold(self, number: int) -> float | None:
        """Return the threshold on the norm of this optimizer step, counted over epochs and mini-batches from 0."""
        return self.thresholds[number % len(self.thresholds)]

    def place(self, number: int) -> Step:
        """Return the place of the optimizer step of this number, counted over epochs and mini-batches from 0."""
        epoch, mini_batch = divmod(number, len(self.num_tokens))
        return Step(self.global_step, epoch, mini_batch, len(self.num_tokens), stage=self.stage)

    def spike(self, grad_norm: float, number: int) -> Spike | None:
        """Return why the optimizer step of this number is to be looked into; None if it is not.

        Args:
            grad_norm: before clipping; may be NaN or inf.
            number: counted over epochs and mini-batches from 0.
        """
        threshold, tau = self.threshold(number), self.tau[number % len(self.tau)]
        num_tokens = self.num_tokens[number % len(self.num_tokens)]
        history = self.history[number % len(self.history)] if self.history else None
        kind = spike_kind(grad_norm, threshold, self.kind)
        if kind is not None:
            return Spike(kind, grad_norm, threshold, tau, num_tokens, history)
        return Spike("forced", grad_norm, None, None, num_tokens, history) if self.force and number == 0 else None


@dataclass(frozen=True)
class RankReport:
    """A process's report of an update, once it is over."""

    process: int
    """Its number among the trainer's; the others leave empty what only the first one knows."""
    norms: tuple[float, ...] = ()
    """The norm of each optimizer step, before clipping; the same on all. Empty where nothing is looked for."""
    head_squares: tuple[float, ...] = ()
    """This process' part of the squared gradient norm of the output head, for each optimizer step."""
    coefficient: float = 0.0
    """Median |d loss / d log_prob| of this rank's tokens in the first mini-batch, where it is not 0."""
    num_failures: int = 0
    """Searches that failed so far."""
    outcomes: tuple[Outcome, ...] = ()
    """All spikes, also those that no event is written of; from the first process."""
    events: tuple[RawEvent, ...] = ()
    """The gathered events, from the first process."""
    learned: Any = None
    """The stabilizers' state, for the next checkpoint; from the first process."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Counts of micro-batches or optimizer steps that the stabilizers changed."""
    peak_bytes: tuple[int, int] = 0, 0
    """The most that this process has used of its device, and that its allocator has reserved: each step resets what the
    device itself reports."""
