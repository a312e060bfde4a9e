# SPDX-License-Identifier: Apache-2.0
"""Where a spike came, why it was looked into, and how its culprits were looked for."""

from dataclasses import dataclass
from typing import Annotated

from .fields import VERDICTS, Count, Interval, never_null, optional

_PHASES = (
    *("micro_batch", "rank", "token", "share", "verify", "residual", "sketch", "coefficients", "bisect"),
    *("transient", "weights", "scale", "others"),
)
_PATH_VERDICTS = ("under", "split", "spread", "culprit", "unopened", "measured", "untrusted", *VERDICTS)


@dataclass(frozen=True)
class Run:
    """Which run the event belongs to, and what made it."""

    project: str | None = None
    experiment: str | None = None
    trainer: str | None = optional()
    """Its name and version, such as ``verl 0.9.1``; null in records from before these were kept, as the next ones."""
    torch: str | None = optional()
    gradloc: str | None = optional()
    model: str | None = optional()
    """What was trained: the path or name that the run was given."""
    commit: str | None = optional()
    """Of the code in the folder that the run was started in, ``-dirty`` where it was changed; null outside of git."""
    config: str | None = optional()
    """Digest of all of the trainer's settings: two runs have the same one if their settings are the same."""
    estimator: str | None = optional()
    """How advantages are made of a group's rewards: ``grpo`` divides by their standard deviation, ``grpo_mean`` does
    not, ``rloo`` subtracts the others' mean; other names are the trainer's. Null where it is not known."""
    rollouts: Count | None = optional()
    """Responses to each prompt."""


@dataclass(frozen=True)
class Step:
    """Where in training, and how the batch was dealt out."""

    global_step: Count = 0
    """The trainer's, from 1."""
    epoch: Count = 0
    """PPO epoch within the step."""
    mini_batch: Count = 0
    """Within the epoch: one optimizer step each."""
    num_mini_batches: Count | None = never_null()
    num_micro_batches: Count | None = never_null()
    """Of each rank in this mini-batch."""
    world_size: Count | None = never_null()
    dp_size: Count | None = never_null()
    """Data-parallel ranks: those that hold different sequences."""
    sp_size: Count | None = never_null()
    """Ulysses ranks that share each sequence."""
    stage: Annotated[str, ("enum", ("low", "high"))] | None = optional()
    """Which of Lopti's two updates of the step; null for the only one."""


@dataclass(frozen=True)
class History:
    """The norms that the adaptive threshold was made of."""

    num_norms: Count = 0
    median_norm: float | None = None
    """Their level."""
    log_sigma: float | None = None
    """How far the larger ones lie above it, as a standard deviation of the natural logarithm."""


@dataclass(frozen=True)
class Trigger:
    """Why this mini-batch was looked into."""

    kind: Annotated[str, ("enum", ("fixed", "adaptive", "non_finite", "forced"))] = "unknown"
    grad_norm: float | None = never_null()
    """L2 norm of the mini-batch's gradient before clipping."""
    threshold: float | None = None
    """The norm from which a step counts as a spike; null on a rehearsal and while the adaptive rule warms up."""
    tau: float | None = None
    """The per-token threshold behind it: threshold = tau / sqrt(num_tokens)."""
    num_tokens: Count | None = never_null()
    """Response tokens of the mini-batch over all ranks."""
    history: History | None = None
    """Null under the fixed rule."""


@dataclass(frozen=True)
class PathEntry:
    """One stage or probe of the search and what came of it."""

    phase: Annotated[str, ("enum", _PHASES)] = ""
    micro_batch: Count | None = None
    ranks: Interval | None = None
    """[first, end); null where the stage is not about a part."""
    tokens: Interval | None = None
    """[first, end) among the rank's response tokens of the micro-batch, row by row; null for all."""
    num_tokens: Count | None = None
    norm: float | None = None
    threshold: float | None = None
    verdict: Annotated[str, ("enum", _PATH_VERDICTS)] = ""
    note: str | None = None


@dataclass(frozen=True)
class Search:
    """How the culprits were looked for, and at what cost."""

    strategy: str = "unknown"
    status: Annotated[str, ("enum", ("found", "not_found", "budget_exhausted", "max_culprits"))] = "unknown"
    """budget_exhausted may still have found some; max_culprits: as many as may be were named, and the rest spikes."""
    stop_reason: str = ""
    """Follows "the search stopped because"."""
    tau: float | None = never_null()
    """Per-token threshold that the search used; on a rehearsal one that is made up."""
    budget: Count | None = never_null()
    """Probes allowed: one forward and backward of one micro-batch each."""
    forwards: Count | None = never_null()
    """Of one micro-batch each, those of the backwards included."""
    backwards: Count | None = never_null()
    """Of one micro-batch each."""
    seconds: float | None = never_null()
    """Wall clock, the certificate included."""
    num_more: Count | None = optional()
    """Culprits beyond those named, at least: where max_culprits ended the search."""
    more_norm: float | None = optional()
    """About the norm of these together: the root of the sum of squares of their lower bounds."""
    path: tuple[PathEntry, ...] = ()
    """In the order taken."""
