# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What GradLoc writes to disk about a spike, and nothing else: the one definition of these files.

``events.jsonl`` holds one :class:`Event` a line; an event's folder holds ``sequences.json`` (:class:`SequenceFile`) and
the replay bundle's ``meta.json`` (:class:`BundleMeta`). The writer fills these classes, the report and the replay read
them, and the JSON Schemas in ``schema/`` are made from them (``scripts/make_schemas.py``).

Standard library only. On disk, numbers that JSON cannot spell are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``. A reader passes over fields that it does not know, and takes a field's default where a file lacks it;
so a name that a later version adds to an ``enum`` is no reason to refuse a file.

``Annotated`` carries what the schema says beyond the type: pairs of a JSON Schema keyword and its value.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

__all__ = [
    "CAUSES",
    "SCHEMA_VERSION",
    "Action",
    "BatchStatistics",
    "BundleEntry",
    "BundleMeta",
    "Cause",
    "Certificate",
    "Coefficients",
    "Culprit",
    "Event",
    "Fingerprint",
    "History",
    "LayerHistory",
    "PathEntry",
    "Ratios",
    "Run",
    "Search",
    "Sequence",
    "SequenceFile",
    "Shares",
    "Step",
    "Trigger",
    "never_null",
    "optional",
]

SCHEMA_VERSION = 1

Version = Annotated[int, ("const", SCHEMA_VERSION)]
Count = Annotated[int, ("minimum", 0)]
Interval = tuple[Count, Count]
Weights = tuple[Count, float, float]

_PHASES = ("micro_batch", "rank", "token", "share", "verify", "residual", "sketch", "coefficients", "bisect")
_JUDGED = ("explained", "undecided", "not_explained")
_PATH_VERDICTS = ("under", "split", "spread", "culprit", "unopened", "measured", "untrusted", *_JUDGED)
_MODES = ("observe", "mask", "skip", "abort")
CAUSES = (
    "token_mismatch",
    "sequence_mismatch",
    "layer_heterogeneity",
    "large_jacobian",
    "extreme_advantage",
    "low_probability",
    "kl_term",
    "entropy_term",
    "is_weight",
    "non_finite",
    "unknown",
)


def never_null() -> Any:
    """Default of a field that the writer always knows: None only where a reader found a file without it."""
    return field(default=None, metadata={"null": False})


def optional() -> Any:
    """Default of a field, None, that files of this schema version may lack."""
    return field(default=None, metadata={"required": False})


# ---- where and why


@dataclass(frozen=True)
class Run:
    """Which run the event belongs to."""

    project: str | None = None
    experiment: str | None = None


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


# ---- the search


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
    status: Annotated[str, ("enum", ("found", "not_found", "budget_exhausted"))] = "unknown"
    """budget_exhausted may still have found some."""
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
    path: tuple[PathEntry, ...] = ()
    """In the order taken."""


# ---- the culprits


@dataclass(frozen=True)
class Ratios:
    """Importance ratios at the peak, and the sequence's."""

    current_over_old: float | None = None
    """With the old log-prob as the loss used it."""
    current_over_rollout: float | None = None
    old_over_rollout: float | None = None
    """With the old log-prob as stored."""
    sequence_geometric_mean: float | None = None
    """Of current over old, over the sequence's response tokens."""


@dataclass(frozen=True)
class Coefficients:
    """What the loss's gradient multiplies the gradients of the log-prob and the entropy with, at the peak."""

    log_prob: float | None = None
    """d loss / d log_prob, all terms."""
    kl: float | None = None
    """The KL term's part of it; null without a KL loss."""
    entropy: float | None = None
    """d loss / d entropy; null without an entropy term."""


@dataclass(frozen=True)
class Cause:
    """Why the culprit's gradient is large."""

    label: Annotated[str, ("enum", CAUSES)] = "unknown"
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What says so: mostly how many times typical each factor of the gradient is."""


@dataclass(frozen=True)
class Culprit:
    """A span of one response that carries the spike. Numbers of a single token are those at ``peak``."""

    span: Annotated[str, ("enum", ("token", "segment", "sequence"))] = "token"
    rank: Count | None = never_null()
    """Data-parallel rank."""
    micro_batch: Count | None = never_null()
    micro_batch_row: Count | None = never_null()
    row: Count | None = None
    """Row of the trainer's batch as it was dispatched."""
    positions: tuple[Count, ...] = ()
    """Response positions of the span, ascending."""
    peak: Count | None = never_null()
    """The position in the span with the largest coefficient."""
    sequence_id: str | None = None
    """<uid>:<rollout index>"""
    data_source: str | None = None
    reward: float | None = None
    """The sequence's: sum of its token-level scores."""
    token_ids: tuple[int, ...] | None = never_null()
    """Of the span."""
    tokens: tuple[str, ...] | None = None
    """Text of each of them; null, as all text here, when the run keeps none."""
    text_before: str | None = None
    text_after: str | None = None
    prompt: str | None = None
    log_prob: float | None = None
    """Natural logarithm of the token's probability in the training forward."""
    old_log_prob_used: float | None = None
    """As the loss used it: the current one under verl's on-policy shortcut."""
    old_log_prob_stored: float | None = None
    rollout_log_prob: float | None = None
    ref_log_prob: float | None = None
    ratios: Ratios = Ratios()
    advantage: float | None = None
    is_weight: float | None = None
    """Weight of the rollout correction; null without one."""
    entropy: float | None = None
    """Of the token's distribution, in nats; null where the loss does not compute it."""
    coefficients: Coefficients = Coefficients()
    loss_weight: float | None = None
    """The token's weight in the aggregated loss."""
    grad_norm: float | None = None
    """L2 norm of the span's part of the gradient."""
    is_exact: bool = True
    """Whether grad_norm was measured by a backward of its own; else it is a lower bound."""
    threshold: float | None = None
    """The norm from which the span counts as a culprit."""
    share: float | None = None
    """<g, G> / ||G||^2; the shares of all tokens add up to 1. Null when the spike is not finite."""
    layers: dict[str, float] = field(default_factory=dict)
    """Norm of the span's part of the gradient per layer; empty unless is_exact."""
    cause: Cause = field(default_factory=Cause)

    @property
    def text(self) -> str:
        """The span's text; where the run kept none, its first token numbers."""
        return "".join(self.tokens or ()) or " ".join(f"<{token}>" for token in (self.token_ids or ())[:20])


# ---- what was measured and done


@dataclass(frozen=True)
class Certificate:
    """The gradient's norm with and without the culprits, and what that proves."""

    norm_before: float | None = never_null()
    norm_after: float | None = never_null()
    error_bound: float | None = never_null()
    """Largest error of norm_after."""
    threshold: float | None = None
    """The trigger's; null on a rehearsal."""
    method: Annotated[str, ("enum", ("swap", "recompute", "none"))] = "none"
    verdict: Annotated[str, ("enum", _JUDGED)] = "undecided"
    reason: str = ""
    replay_difference: float | None = optional()
    """L2 norm of the difference of two replays of the micro-batches that hold culprits; 0: kernels repeat, null:
    nothing was replayed."""


@dataclass(frozen=True)
class Action:
    """What was asked for, and what was done with the step."""

    requested: Annotated[str, ("enum", _MODES)] = "observe"
    taken: Annotated[str, ("enum", _MODES)] = "observe"
    reason: str = ""


@dataclass(frozen=True)
class LayerHistory:
    """Each layer's norm beside its own earlier ones, and how the layers moved together before."""

    num_steps: Annotated[int, ("minimum", 2)] | None = never_null()
    """Optimizer steps compared with."""
    excess: dict[str, float] = field(default_factory=dict)
    """Norm over the median of the layer's own history."""
    spread: float | None = never_null()
    """Largest excess over the median layer's."""
    mean_correlation: float | None = never_null()
    """Mean over pairs of layers of the correlation over time of their log-norms, in [-1, 1]."""


@dataclass(frozen=True)
class Shares:
    """Measured shares of the spike by micro-batch and rank."""

    closure: float | None = never_null()
    """Sum of all measured shares; 1 when the measurement is right."""
    is_trusted: bool = True
    """Whether closure is within the band for the precision."""
    micro_batches: tuple[tuple[float, ...], ...] = ()
    """One list per micro-batch, one share per rank."""


@dataclass(frozen=True)
class BatchStatistics:
    """What is typical in the batch: what the causes compare a culprit with."""

    advantage: float = 0.0
    """Median |advantage| over the response tokens whose advantage is not zero."""
    one_minus_prob: float = 0.0
    """Mean of 1 - pi_old over response tokens (arXiv 2505.12929: a token's gradient goes with 1 - pi)."""
    jacobian: float | None = None
    """Norm of a typical token's log-prob gradient: residual norm over the root sum of squared coefficients."""
    layer_spread: float | None = None
    """See layer_history.spread."""


@dataclass(frozen=True)
class Event:
    """A localized gradient spike: one line of events.jsonl."""

    schema_version: Version = SCHEMA_VERSION
    event_id: Annotated[str, ("minLength", 1)] = ""
    verdict: str | None = never_null()
    """What happened, in two sentences."""
    run: Run = Run()
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
    folder: str | None = None
    """Folder with batch.safetensors, meta.json and sequences.json, relative to events.jsonl."""


# ---- an event's folder


@dataclass(frozen=True)
class Sequence:
    """One response that holds a culprit, or a notable share of the spike; lists run over its T response tokens."""

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
    response_mask: tuple[float, ...] | None = never_null()
    log_prob: tuple[float, ...] | None = None
    old_log_prob: tuple[float, ...] | None = None
    """As stored."""
    rollout_log_prob: tuple[float, ...] | None = None
    ref_log_prob: tuple[float, ...] | None = None
    advantage: tuple[float, ...] | None = None
    entropy: tuple[float, ...] | None = None
    is_weight: tuple[float, ...] | None = None
    coefficient: tuple[float, ...] | None = None
    """d loss / d log_prob."""
    share: tuple[float, ...] | None = None
    """Of the spike; null when not measured."""

    def __len__(self) -> int:
        known = (self.token_ids, self.tokens, self.response_mask, self.log_prob, self.share)
        return max((len(column) for column in known if column is not None), default=0)

    @property
    def ids(self) -> tuple[int, ...]:
        """The token numbers; where the run kept none, -1 - position, so that no two are equal."""
        kept = self.token_ids or ()
        return kept + tuple(-1 - position for position in range(len(kept), len(self)))


@dataclass(frozen=True)
class SequenceFile:
    """The sequences that hold culprits, token by token: sequences.json."""

    schema_version: Version = SCHEMA_VERSION
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
    """A replay bundle's meta.json, beside batch.safetensors; what a replay uses is required."""

    actor: dict[str, Any]
    """verl's actor config of the run, resolved."""
    temperature: float
    on_policy: bool
    """Whether the loss took the current log-probs for the old ones (verl's shortcut)."""
    layout: tuple[BundleEntry, ...]
    event: Annotated[Event, ("type", "object")]
    """The event record; see event.v1.schema.json."""
    checkpoint: str | None = optional()
    """Folder with the weights before the step, where they were saved."""
    fingerprint: Fingerprint | None = optional()
    """Of the weights that the event happened at."""
    schema_version: Version = SCHEMA_VERSION
