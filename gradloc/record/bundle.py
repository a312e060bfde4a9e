# SPDX-License-Identifier: Apache-2.0
"""An event's folder: the sequences token by token (``sequences.json``), and the replay bundle (``meta.json``)."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from . import BY_COLUMN, EVENT_VERSION, Count, Event, EventVersion, Interval, never_null, optional
from .columns import column

BUNDLE_VERSION = 2
"""Version of a bundle. Version 1 had no coefficients: a replay ran the trainer's loss."""
Weights = tuple[Count, float, float]


@dataclass(frozen=True)
class Sequence:
    """One response that holds a culprit or a notable share of the spike: T rows of the table of tokens."""

    rank: Count | None = never_null()
    micro_batch: Count | None = never_null()
    micro_batch_row: Count | None = never_null()
    row: Count | None = None
    sequence_id: str | None = None
    data_source: str | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    """Null, as all text, when the run keeps none."""
    tokens: tuple[str, ...] | None = None
    columns: Annotated[dict[str, tuple[float, ...]], BY_COLUMN] = field(default_factory=dict)
    """The table of its tokens, by column; what is not known is left out."""
    pictures: tuple[str, ...] | None = optional()
    """PNG files in the event's folder, in the order of the prompt; null for text, and when the run keeps no text."""
    pictures_note: str | None = optional()
    """Why some or all of them are missing; null when none are."""

    def __len__(self) -> int:
        return max(map(len, (self.token_ids or (), self.tokens or (), *self.columns.values())), default=0)

    def column(self, name: str) -> tuple[float, ...] | None:
        """Return a column over the tokens, computed where it is no stored one; None where it is not known."""
        return column(self.columns, name)

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token numbers; where the run kept none, -1 - position, so that no two are equal."""
        kept = self.token_ids or ()
        return kept + tuple(-1 - position for position in range(len(kept), len(self)))


@dataclass(frozen=True)
class SequenceFile:
    """The sequences that hold culprits, token by token: sequences.json."""

    schema_version: EventVersion = EVENT_VERSION
    event_id: str = ""
    sequences: tuple[Sequence, ...] = ()


@dataclass(frozen=True)
class BundleEntry:
    """One micro-batch of the bundle."""

    rank: Count
    micro_batch: Count
    rows: Interval
    """[first, end) in the tensors of batch.safetensors."""


@dataclass(frozen=True)
class Fingerprint:
    """The trainable weights, each entry as number of weights, their sum, their sum of squares (float64)."""

    total: Weights
    parameters: dict[str, Weights] | None
    """By full name; null where FSDP1's flat parameters hide the names."""


@dataclass(frozen=True)
class BundleMeta:
    """A replay bundle's meta.json; the fields that a replay uses are required."""

    temperature: float
    """Divisor of the logits; meaningless for a critic."""
    layout: tuple[BundleEntry, ...]
    event: Annotated[Event, ("type", "object")]
    """The event record; see event.v2.schema.json."""
    dtype: str | None = optional()
    """Precision of the forward: ``float32``, ``bfloat16`` or ``float16``. Weights and gradients are float32."""
    loss_scale: float | None = optional()
    """Factor on the coefficients with which the run's backward began (fp16)."""
    has_beside: bool | None = optional()
    """Whether a part of the run's loss passes through no token, so that neither coefficients nor a replay have it."""
    actor: dict[str, Any] | None = optional()
    """The trained model's config of the run, resolved: verl's of the actor, TRL's arguments."""
    checkpoint: str | None = optional()
    """Folder with the weights before the step, where they were saved."""
    fingerprint: Fingerprint | None = optional()
    """Fingerprint of the weights at the event."""
    multi_modal_note: str | None = optional()
    """Why the multi-modal inputs are not in batch.safetensors; null where they are, or where there are none."""
    schema_version: Annotated[int, ("const", BUNDLE_VERSION)] = BUNDLE_VERSION
