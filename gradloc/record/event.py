# SPDX-License-Identifier: Apache-2.0
"""One line of events.jsonl."""

from dataclasses import dataclass, field
from typing import Annotated

from .culprit import Culprit
from .fields import SCHEMA_VERSION, Version, never_null, optional
from .outcome import (
    Action,
    BatchStatistics,
    Certificate,
    Consequence,
    FirstNotFinite,
    LayerHistory,
    Rerun,
    Shares,
    StepCause,
)
from .spike import Run, Search, Step, Trigger


@dataclass(frozen=True)
class Event:
    """A localized gradient spike: one line of events.jsonl."""

    schema_version: Version = SCHEMA_VERSION
    event_id: Annotated[str, ("minLength", 1)] = ""
    verdict: str | None = never_null()
    """What happened, in up to three sentences."""
    run: Run = Run()
    time: Annotated[str, ("format", "date-time")] | None = optional()
    """When it was completed, UTC."""
    step: Step = Step()
    trigger: Trigger = Trigger()
    search: Search = Search()
    culprits: tuple[Culprit, ...] = ()
    certificate: Certificate = Certificate()
    action: Action = Action()
    layers: dict[str, float] = field(default_factory=dict)
    """Norm of the spike's gradient per layer."""
    kinds: dict[str, float] = field(default_factory=dict)
    """The same per kind of module."""
    layer_history: LayerHistory | None = None
    """Null where the layers' norms are not tracked, or not yet."""
    shares: Shares | None = None
    """Null when they were not measured."""
    batch: BatchStatistics = BatchStatistics()
    cause: StepCause | None = optional()
    rerun: Rerun | None = optional()
    """Null where it was not asked for."""
    first_not_finite: FirstNotFinite | None = optional()
    """Null where the gradient is finite, or where it was not looked for or found."""
    consequence: Consequence | None = optional()
    model: Annotated[str, ("enum", ("actor", "critic"))] | None = optional()
    """Whose gradient it is; null for the actor's."""
    head_grad_norm: float | None = optional()
    """Norm of the spike's gradient at the output head (at the embedding where the two are tied), before clipping: a
    lower bound on how far such a step moves the policy (arXiv 2605.19425)."""
    folder: str | None = None
    """Folder with batch.safetensors, meta.json and sequences.json, relative to events.jsonl."""
