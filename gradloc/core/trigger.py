# SPDX-License-Identifier: Apache-2.0
"""Is this norm a spike? Pure rules over numbers; nothing here measures.

Fixed rule (GradLoc): tau / sqrt(N), with tau a per-token threshold and N the response tokens of the mini-batch over
all ranks. The adaptive rule is in :mod:`.adaptive`.
"""

import math
from dataclasses import dataclass

from .history import Summary


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
