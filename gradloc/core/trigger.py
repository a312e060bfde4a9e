# SPDX-License-Identifier: Apache-2.0
"""Is this norm a spike? Pure rules over numbers; nothing here measures.

Fixed rule (GradLoc): tau / sqrt(N), with tau a per-token threshold and N the response tokens of the mini-batch over
all ranks. The adaptive rule is in :mod:`.adaptive`.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from .history import Summary

__all__ = ["Place", "StepPolicy", "Spike", "fixed_threshold", "spike_kind"]


def fixed_threshold(tau: float, num_tokens: int) -> float:
    """The published threshold on the mini-batch's gradient norm; inf for a mini-batch without response tokens."""
    return tau / math.sqrt(num_tokens) if num_tokens > 0 else math.inf


@dataclass(frozen=True)
class Place:
    """Where in training an event happened."""

    global_step: int
    epoch: int
    mini_batch: int
    num_mini_batches: int
    history: Summary | None
    """What the adaptive threshold was made of; None under the fixed rule."""
    stage: str | None = None
    """Which of Lopti's two updates of the step; None for the only one."""


@dataclass(frozen=True)
class Spike:
    """Why a mini-batch is looked into, in numbers."""

    kind: str
    """``fixed``, ``adaptive``, ``non_finite`` or ``forced``."""
    grad_norm: float
    threshold: float | None
    tau: float | None
    num_tokens: int


@dataclass
class StepPolicy:
    """What the driver tells every rank about one trainer step; the ranks need no collective to agree on it."""

    global_step: int
    kind: str
    """``fixed`` or ``adaptive``."""
    num_tokens: list[int]
    """Response tokens over all ranks, per mini-batch."""
    thresholds: list[float | None]
    """On the gradient norm, per optimizer step (epochs x mini-batches); None while the adaptive rule warms up."""
    tau: list[float | None]
    """Per-token threshold, per optimizer step; None where there is no threshold."""
    max_events: int
    """Spikes of this update that an event may be written of; the action applies to all."""
    force: bool = False
    """Localize the first mini-batch even when it does not spike."""
    history: list[Summary] = field(default_factory=list)
    """What each adaptive threshold was made of, for the record; empty under the fixed rule."""
    stage: str | None = None
    """Which of Lopti's two updates of the step this is; None for the only one."""
    typical: dict[str, tuple[float, float]] = field(default_factory=dict)
    """What is typical of the run's own batches, by name: see ``core.scale.ScaleHistory.typical``."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def threshold(self, number: int) -> float | None:
        """On the norm of the optimizer step of this number, counted over epochs and mini-batches from 0."""
        return self.thresholds[number % len(self.thresholds)]

    def place(self, number: int) -> Place:
        """Where the optimizer step of this number is, counted over epochs and mini-batches from 0."""
        epoch, mini_batch = divmod(number, len(self.num_tokens))
        history = self.history[number % len(self.history)] if self.history else None
        return Place(self.global_step, epoch, mini_batch, len(self.num_tokens), history, self.stage)

    def spike(self, grad_norm: float, number: int) -> Spike | None:
        """Why the optimizer step of this number is to be looked into, None if it is not.

        Args:
            grad_norm: before clipping; may be NaN or inf.
            number: counted over epochs and mini-batches from 0.
        """
        threshold, tau = self.threshold(number), self.tau[number % len(self.tau)]
        num_tokens = self.num_tokens[number % len(self.num_tokens)]
        kind = spike_kind(grad_norm, threshold, self.kind)
        if kind is not None:
            return Spike(kind, grad_norm, threshold, tau, num_tokens)
        return Spike("forced", grad_norm, None, None, num_tokens) if self.force and number == 0 else None


def spike_kind(grad_norm: float, threshold: float | None, kind: str) -> str | None:
    """Which rule a norm breaks.

    Args:
        grad_norm: the mini-batch's norm before clipping; may be NaN or inf.
        threshold: None while there is none yet.
        kind: the rule behind the threshold.

    Returns:
        ``non_finite`` for NaN and inf, ``kind`` when over the threshold, else None.
    """
    if not math.isfinite(grad_norm):
        return "non_finite"
    return kind if threshold is not None and grad_norm > threshold else None
