# SPDX-License-Identifier: Apache-2.0
"""An event as the report sees it: the fields of schema/event.v1.schema.json that it shows.

Every field has a default, and fields that are not known are passed over: a record of another
version is shown as far as it can be read. Numbers that JSON cannot spell arrive as "NaN",
"Infinity" and "-Infinity" and become floats.
"""

from typing import Any

import msgspec

SCHEMA_VERSION = 1

Number = float | None


class Run(msgspec.Struct):
    """Which run the event belongs to."""

    project: str | None = None
    experiment: str | None = None


class Step(msgspec.Struct):
    """Where in training, and how the batch was dealt out."""

    global_step: int = 0
    epoch: int = 0
    mini_batch: int = 0
    num_mini_batches: int | None = None
    num_micro_batches: int | None = None
    world_size: int | None = None
    dp_size: int | None = None
    sp_size: int | None = None


class Trigger(msgspec.Struct):
    """Why this step was looked at."""

    kind: str = "unknown"
    grad_norm: Number = None
    threshold: Number = None
    tau: Number = None
    num_tokens: int | None = None


class Probe(msgspec.Struct):
    """One measured part of the batch: an entry of the search's path."""

    phase: str = ""
    micro_batch: int | None = None
    ranks: list[int] | None = None
    tokens: list[int] | None = None
    num_tokens: int | None = None
    norm: Number = None
    threshold: Number = None
    verdict: str = ""
    note: str | None = None


class Search(msgspec.Struct):
    """How the culprits were looked for, and at what cost."""

    strategy: str = "unknown"
    status: str = "unknown"
    stop_reason: str = ""
    budget: int | None = None
    forwards: int | None = None
    backwards: int | None = None
    seconds: Number = None
    path: list[Probe] = []


class Ratios(msgspec.Struct):
    """Importance ratios at the culprit, and the sequence's geometric mean."""

    current_over_old: Number = None
    current_over_rollout: Number = None
    old_over_rollout: Number = None
    sequence_geometric_mean: Number = None


class Coefficients(msgspec.Struct):
    """d loss / d log-prob (all terms; the KL term alone) and d loss / d entropy."""

    log_prob: Number = None
    kl: Number = None
    entropy: Number = None


class Cause(msgspec.Struct):
    """Why the culprit's gradient is large, and the numbers that say so."""

    label: str = "unknown"
    numbers: dict[str, Number] = {}


class Culprit(msgspec.Struct):
    """A span of one response that made the spike."""

    span: str = "token"
    rank: int | None = None
    micro_batch: int | None = None
    micro_batch_row: int | None = None
    row: int | None = None
    positions: list[int] = []
    peak: int | None = None
    """Of a longer span, the position whose numbers the record gives."""
    is_exact: bool = True
    """Whether the norm was measured; else it is a lower bound."""
    sequence_id: str | None = None
    data_source: str | None = None
    reward: Number = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None
    """Null when the run kept no text."""
    text_before: str | None = None
    text_after: str | None = None
    prompt: str | None = None
    log_prob: Number = None
    old_log_prob_used: Number = None
    old_log_prob_stored: Number = None
    rollout_log_prob: Number = None
    ref_log_prob: Number = None
    ratios: Ratios = msgspec.field(default_factory=Ratios)
    advantage: Number = None
    is_weight: Number = None
    entropy: Number = None
    coefficients: Coefficients = msgspec.field(default_factory=Coefficients)
    loss_weight: Number = None
    grad_norm: Number = None
    threshold: Number = None
    share: Number = None
    layers: dict[str, Number] = {}
    cause: Cause = msgspec.field(default_factory=Cause)

    @property
    def text(self) -> str:
        """The span's text; where the run kept none, its token numbers."""
        kept = "".join(self.tokens or [])
        return kept or " ".join(f"<{token}>" for token in (self.token_ids or [])[:20])


class Certificate(msgspec.Struct):
    """The gradient's norm with and without the culprits, and what that proves."""

    norm_before: Number = None
    norm_after: Number = None
    error_bound: Number = None
    threshold: Number = None
    method: str = "none"
    verdict: str = "undecided"
    reason: str = ""


class Action(msgspec.Struct):
    """What was asked for, and what was done with the step."""

    requested: str = "observe"
    taken: str = "observe"
    reason: str = ""


class Shares(msgspec.Struct):
    """Measured shares of the spike per micro-batch and rank; closure is their sum, 1 when right."""

    closure: Number = None
    is_trusted: bool = True
    micro_batches: list[list[Number]] = []


class LayerHistory(msgspec.Struct):
    """Each layer's norm over the median of its own history."""

    num_steps: int | None = None
    excess: dict[str, Number] = {}
    spread: Number = None
    mean_correlation: Number = None


class Event(msgspec.Struct):
    """One localized spike: a line of events.jsonl."""

    schema_version: Any = None
    event_id: str = ""
    verdict: str | None = None
    run: Run = msgspec.field(default_factory=Run)
    step: Step = msgspec.field(default_factory=Step)
    trigger: Trigger = msgspec.field(default_factory=Trigger)
    search: Search = msgspec.field(default_factory=Search)
    culprits: list[Culprit] = []
    certificate: Certificate = msgspec.field(default_factory=Certificate)
    action: Action = msgspec.field(default_factory=Action)
    layers: dict[str, Number] = {}
    kinds: dict[str, Number] = {}
    layer_history: LayerHistory | None = None
    shares: Shares | None = None
    folder: str | None = None


class Sequence(msgspec.Struct):
    """One response that holds culprits, token by token; lists run over the response's T tokens."""

    rank: int | None = None
    micro_batch: int | None = None
    micro_batch_row: int | None = None
    row: int | None = None
    sequence_id: str | None = None
    data_source: str | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None
    response_mask: list[Number] | None = None
    log_prob: list[Number] | None = None
    old_log_prob: list[Number] | None = None
    rollout_log_prob: list[Number] | None = None
    ref_log_prob: list[Number] | None = None
    advantage: list[Number] | None = None
    entropy: list[Number] | None = None
    is_weight: list[Number] | None = None
    coefficient: list[Number] | None = None
    share: list[Number] | None = None

    def __len__(self) -> int:
        known = (self.token_ids, self.tokens, self.response_mask, self.log_prob, self.share)
        return max((len(column) for column in known if column is not None), default=0)

    @property
    def ids(self) -> list[int]:
        """The token numbers; where the run kept none, -1 - position, so that no two are equal."""
        kept = self.token_ids or []
        return kept + [-1 - position for position in range(len(kept), len(self))]


class SequenceFile(msgspec.Struct):
    """sequences.json of one event."""

    schema_version: Any = None
    sequences: list[Sequence] = []


def convert(raw: Any, kind: type) -> Any:
    """Turn parsed JSON into a record.

    Args:
        raw: what ``json.loads`` returned.
        kind: one of the classes above.

    Raises:
        msgspec.ValidationError: names the field that has the wrong type.
    """
    return msgspec.convert(raw, kind, strict=False)
