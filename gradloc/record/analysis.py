# SPDX-License-Identifier: Apache-2.0
"""Definition of the files of the two gradient analyses: ``step_<N>.json`` in their folders.

As in :mod:`.record`: the writer fills these classes, the report reads them, the JSON Schemas are made from them, and
``Annotated`` carries pairs of a JSON Schema keyword and its value. Standard library only.

*Norm* is the L2 norm of a gradient before clipping. A bucket's or quartile's *part* of the gradient keeps the weight
that its tokens have in the whole batch, so the parts add up to the whole.
"""

from dataclasses import dataclass, field
from typing import Annotated

from . import SCHEMA_VERSION, Count, Version, never_null

QUARTILES = ("q1", "q2", "q3", "q4")
UPDATES = ("all", "lowest", "highest", "none")

Ratio = Annotated[float, ("minimum", 0), ("maximum", 1)]


# ---- of both


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The analysed run."""

    project: str
    experiment: str


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss whose gradient was split."""

    terms: tuple[Annotated[str, ("enum", ("task", "entropy", "kl"))], ...]
    """Terms that this run's loss has."""
    loss_mode: str
    loss_agg_mode: str
    adv_estimator: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the analysis."""

    forwards: Count
    """Forwards of one micro-batch on each rank."""
    backwards: Count
    probe_seconds: float
    """Seconds of the workers."""
    seconds: float
    """Wall clock, as the trainer saw it."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of a number over a bucket or quartile."""

    min: float
    mean: float
    max: float


# ---- by reward variance


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Groups that the rollout filter kept."""

    kept_count: Count
    """Groups kept."""
    kept_ratio: Ratio
    zero_count: Count
    """Groups whose rewards are all equal."""
    empty: Ratio
    """1 when nothing would have been kept, so that the filter let all pass."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The analysed batch; a group is the rollouts of one prompt."""

    source: Annotated[str, ("enum", ("training", "separate"))]
    num_groups: Count
    num_rows: Count
    num_tokens: Count
    """Response tokens."""
    zero_variance_share: Ratio
    """Share of the groups whose rewards are all equal."""
    filter: Filter | None


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Gradient norms of one term of the loss in one bucket."""

    own: float
    """Norm of the gradient if the bucket were the batch: part divided by weight."""
    part: float
    """Norm of the bucket's part of the gradient."""
    per_row: float
    """part over the bucket's rows."""
    per_token: float | None
    """part over its response tokens; null without any."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket of groups; the last one, all, is the whole batch."""

    name: str
    num_rows: Count
    row_share: Ratio
    """Share of the batch's rows."""
    num_tokens: Count
    num_groups: Count
    reward_std: Range
    """Range of the groups' reward deviations."""
    weight: dict[str, float]
    """Per term of the loss: the bucket's share of the average; the buckets' add up to 1."""
    norm: dict[str, Norms]
    """Per term."""
    loss: dict[str, float]
    """The bucket's mean of policy, entropy, kl and their sum total, coefficients included; empty where the trainer's
    loss cannot be asked."""
    cosine: dict[str, float | None]
    """Between two terms' gradients, task_entropy and so on; null where one is zero or not finite."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt."""

    bucket: str
    group_id: Count
    reward_std: float
    reward_mean: float
    num_rows: Count
    uid: str


@dataclass(frozen=True, kw_only=True)
class GradientAnalysis:
    """A gradient analysis by reward variance: gradient_analysis/step_<N>.json."""

    schema_version: Version = SCHEMA_VERSION
    run: TrainingRun
    global_step: Annotated[int, ("minimum", 1)]
    bucket_mode: Annotated[str, ("enum", ("quantile", "fixed_rv"))]
    num_buckets: Annotated[int, ("minimum", 1)]
    """Number as configured; there may be fewer."""
    loss: Loss
    batch: Batch
    buckets: Annotated[tuple[Bucket, ...], ("minItems", 2)]
    task_cosines: tuple[tuple[float | None, ...], ...]
    """Between the buckets' task gradients, bucket x bucket, without all; null where one is zero or not finite."""
    groups: tuple[Group, ...]
    """Groups in ascending order of deviation."""
    cost: Cost
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics logged to the trackers at this step."""


# ---- by quartile of the tokens' probability


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole batch's gradient, from a pass of its own."""

    norm: float
    num_tokens: Count


@dataclass(frozen=True, kw_only=True)
class Quartile:
    """One quartile, the least probable tokens first; null where it has no tokens."""

    name: Annotated[str, ("enum", QUARTILES)]
    num_tokens: Count
    token_share: float | None = None
    probability: Range | None = None
    one_minus_probability: float | None = None
    """Mean of 1 - pi."""
    mean_abs_advantage: float | None = None
    norm: float
    """Norm of the quartile's part of the gradient."""
    norm_per_token: float | None = None
    """The norm over the number of tokens."""
    gradient_share: float | None = None
    """<part, whole> / ||whole||^2; the shares add up to 1."""
    cosine: float | None = None
    """Between the part and the whole."""
    sampled: Count = 0
    """Tokens of it whose own gradient was measured."""
    mean_log_prob_norm: float | None = None
    """Mean norm of single tokens' gradients of log pi."""
    median_log_prob_norm: float | None = None
    mean_loss_norm: float | None = None
    """Mean norm of single tokens' parts of the training gradient."""


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """A token whose own gradient was measured."""

    row: Count = 0
    position: Count = 0
    """Position in the response."""
    token_id: Count = 0
    quartile: Annotated[int, ("minimum", 1), ("maximum", len(QUARTILES))]
    probability: float
    advantage: float = 0.0
    log_prob_norm: float | None
    """Norm of the gradient of log pi; null where it is not known."""
    loss_norm: float
    """Norm of its part of the training gradient."""


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """Spearman's, of 1 - pi with the sampled tokens' norms; null where a side does not vary."""

    log_prob_norm: float | None = None
    loss_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changes of the probabilities of one quartile's tokens in one update."""

    mean: float
    mean_abs: float
    """Mean of the sizes."""
    percentiles: Annotated[tuple[float, ...], ("minItems", 7), ("maxItems", 7)]
    """Changes at 0, 5, 25, 50, 75, 95 and 100 percent."""
    counts: tuple[Count, ...]
    """Tokens per bin of edges."""
    right_way: float | None = None
    """Share of the tokens with an advantage whose probability followed its sign."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Similarity of an update's probability changes to those of the update of all tokens."""

    correlation: float | None = None
    """Pearson's, in [-1, 1]; null where undefined."""
    ratio: float | None = None
    """Mean size of the changes over that of the update of all tokens; null where that changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Changes of all tokens in one update."""

    edges: tuple[float, ...]
    """Edges of the bins, the same for all updates."""
    quartiles: Annotated[tuple[Change | None, ...], ("minItems", len(QUARTILES)), ("maxItems", len(QUARTILES))]
    """Null: the quartile has no tokens."""
    agreement: Agreement | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update that was tried and taken back."""

    is_taken: bool
    """False after a norm that is not finite."""
    grad_norm: float
    """Before clipping."""
    clip_factor: float
    """Factor of clipping."""
    update_norm: float
    """Norm of the change of the weights."""
    changes: Moved | None = None
    """Null where no step was taken."""
    own_changes: Moved | None = None
    """The changes minus those of the update with no gradient."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer that took the steps."""

    name: str
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class QuartileAnalysis:
    """A quartile analysis: quartile_analysis/step_<N>.json."""

    schema_version: Version = SCHEMA_VERSION
    run: TrainingRun | None = never_null()
    global_step: Annotated[int, ("minimum", 1)]
    split: Annotated[str, ("enum", ("quantile", "range"))]
    """Four parts of equally many tokens, or quarters of the probabilities from 0 to 1."""
    num_rows: Count = 0
    loss: Loss | None = never_null()
    whole: Whole
    closure: float | None = None
    """Norm of (sum of the parts - whole) over the norm of the whole; null where that is 0."""
    quartiles: Annotated[tuple[Quartile, ...], ("minItems", len(QUARTILES)), ("maxItems", len(QUARTILES))]
    tokens: tuple[SampledToken, ...]
    """The sampled tokens."""
    rank_correlation: Correlations
    updates: Annotated[dict[str, Update | None], ("required", UPDATES), ("maxProperties", len(UPDATES))]
    """Null where the quartile has no gradient; none is the update with a gradient of zero."""
    optimizer: Optimizer
    cost: Cost | None = never_null()
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics logged to the trackers."""
