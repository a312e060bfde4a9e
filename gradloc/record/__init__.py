# SPDX-License-Identifier: Apache-2.0
"""Definition of the files that GradLoc writes about a spike.

``events.jsonl`` holds one :class:`Event` per line; :mod:`.bundle` describes its folder. The writer fills these
classes, the report and the replay read them, and ``scripts/make_schemas.py`` makes ``schema/`` from them.

Standard library only. On disk, numbers that JSON cannot spell are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``. A reader ignores unknown fields, takes a field's default where a file lacks it, and accepts unknown
names of an ``enum``.

``Annotated`` carries pairs of a JSON Schema keyword and its value for the schema.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from . import columns

SCHEMA_VERSION = 1
"""Version of the files that have no version of their own."""
EVENT_VERSION = 2
"""Version of an event and of its table of tokens. :mod:`.version1` converts files of version 1."""
VERDICTS = ("explained", "undecided", "not_explained")

Version = Annotated[int, ("const", SCHEMA_VERSION)]
EventVersion = Annotated[int, ("const", EVENT_VERSION)]
Count = Annotated[int, ("minimum", 0)]
BY_COLUMN = ("propertyNames", "columns")
"""Marks an object whose names are stored columns of the table of tokens."""
Interval = tuple[Count, Count]


def never_null() -> Any:
    """Declare a field that the writer always knows; None only where a file lacks it."""
    return field(default=None, metadata={"null": False})


def optional() -> Any:
    """Declare a field that files of this schema version may lack; its default is None."""
    return field(default=None, metadata={"required": False})


# ---- run, step, trigger, search

_PHASES = (
    *("micro_batch", "rank", "token", "share", "verify", "residual", "coefficients", "bisect"),
    "sketch",  # of earlier versions
    *("transient", "weights", "scale", "others", "fault", "replay"),
)
_PATH_VERDICTS = ("under", "split", "spread", "culprit", "unopened", "measured", "untrusted", "differs", *VERDICTS)


@dataclass(frozen=True)
class Run:
    """The run of an event, and the versions that made it."""

    project: str | None = None
    experiment: str | None = None
    trainer: str | None = optional()
    """Name and version, such as ``verl 0.9.1``; this and the next fields are null in older records."""
    torch: str | None = optional()
    gradloc: str | None = optional()
    model: str | None = optional()
    """Path or name of the trained model, as the run was given it."""
    commit: str | None = optional()
    """Git commit of the folder that the run was started in, ``-dirty`` with changes; null outside of git."""
    config: str | None = optional()
    """Digest of all of the trainer's settings; equal for runs with equal settings."""
    estimator: str | None = optional()
    """Estimator of the advantages: ``grpo`` divides a group's rewards by their standard deviation, ``grpo_mean`` does
    not, ``rloo`` subtracts the others' mean; other names are the trainer's. Null where it is not known."""
    rollouts: Count | None = optional()
    """Responses per prompt."""


@dataclass(frozen=True)
class Step:
    """Place in training, and how the batch was split over ranks."""

    global_step: Count = 0
    """The trainer's step, from 1."""
    epoch: Count = 0
    """PPO epoch within the step."""
    mini_batch: Count = 0
    """Number within the epoch; each is one optimizer step."""
    num_mini_batches: Count | None = never_null()
    num_micro_batches: Count | None = never_null()
    """Micro-batches per rank in this mini-batch."""
    world_size: Count | None = never_null()
    dp_size: Count | None = never_null()
    """Data-parallel ranks: those that hold different sequences."""
    sp_size: Count | None = never_null()
    """Ulysses ranks that share each sequence."""
    stage: Annotated[str, ("enum", ("low", "high"))] | None = optional()
    """Lopti's update of the step; null for a run without Lopti."""


@dataclass(frozen=True)
class History:
    """Norms that the adaptive threshold was learned from."""

    num_norms: Count = 0
    median_norm: float | None = None
    """Level of the norms."""
    log_sigma: float | None = None
    """Standard deviation of the natural logarithm of the norms above their level."""


@dataclass(frozen=True)
class Trigger:
    """Reason why the mini-batch was searched."""

    kind: Annotated[str, ("enum", ("fixed", "adaptive", "non_finite", "forced"))] = "unknown"
    grad_norm: float | None = never_null()
    """L2 norm of the mini-batch's gradient before clipping."""
    threshold: float | None = None
    """The norm above which a step counts as a spike; null on a rehearsal and while the adaptive rule warms up."""
    tau: float | None = None
    """Per-token threshold: threshold = tau / sqrt(num_tokens)."""
    num_tokens: Count | None = never_null()
    """Response tokens of the mini-batch over all ranks."""
    history: History | None = None
    """Null under the fixed rule."""


@dataclass(frozen=True)
class PathEntry:
    """One stage or probe of the search, with its outcome."""

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
    """The search for culprits: method, outcome, cost."""

    strategy: str = "unknown"
    status: Annotated[str, ("enum", ("found", "not_found", "budget_exhausted", "max_culprits"))] = "unknown"
    """budget_exhausted may still have found some; max_culprits: the limit was reached, and the rest still spikes."""
    stop_reason: str = ""
    """Completes "the search stopped because"."""
    tau: float | None = never_null()
    """Per-token threshold that the search used; an arbitrary one on a rehearsal."""
    budget: Count | None = never_null()
    """Probes allowed: one forward and backward of one micro-batch each."""
    forwards: Count | None = never_null()
    """Forwards of one micro-batch, those before backwards included."""
    backwards: Count | None = never_null()
    """Backwards of one micro-batch."""
    seconds: float | None = never_null()
    """Wall clock, the certificate included."""
    num_more: Count | None = optional()
    """Least number of culprits not named, where max_culprits ended the search."""
    more_norm: float | None = optional()
    """Approximate norm of these together: root of the sum of squares of their lower bounds."""
    path: tuple[PathEntry, ...] = ()
    """Stages in order."""


# ---- a culprit, and why its gradient is large

TOKEN_CAUSES = (
    *("token_mismatch", "sequence_mismatch", "layer_heterogeneity", "large_jacobian", "extreme_advantage"),
    *("low_probability", "kl_term", "entropy_term", "is_weight", "value_outlier", "teacher_gap", "non_finite"),
    *("spurious_token", "loss_weight", "unexpected_token", "odd_document", "duplicate_document", "shifted_labels"),
    *("padding_trained", "not_sampled", "shifted_log_probs", "non_finite_forward", "non_finite_backward"),
    "non_finite_input",
)
"""Labels of a token's, row's or document's large gradient."""
STEP_CAUSES = (
    *("non_finite_padding", "non_finite_weights", "replicas_differ", "batch_scale", "not_tokens", "transient"),
    *("gradient_changed", "gradient_scaled", "update_too_large", "learning_rate_jumped", "weight_decay"),
    *("second_moments", "moments_lost", "weights_changed", "weights_grown"),
)
"""Labels of a step that no token made a spike."""
CAUSES = (*TOKEN_CAUSES, *STEP_CAUSES, "unknown")
"""Labels of a step's cause: its largest culprit's, or one of its own."""


@dataclass(frozen=True)
class Cause:
    """Cause of a culprit's large gradient."""

    label: Annotated[str, ("enum", CAUSES)] = "unknown"
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Evidence: mostly the multiple of typical of each factor of the gradient."""


@dataclass(frozen=True)
class Sibling:
    """Another response to the culprit's prompt: an advantage is only as odd as its group."""

    row: Count = 0
    sequence_id: str | None = None
    reward: float | None = None
    advantage: float | None = None
    """Advantage of its first response token."""
    num_tokens: Count = 0


_SHORTEST_ANSWER = 2  # tokens: a single one that is left out of the loss is no tool's answer


def turns_in(mask: Iterable[float]) -> list[range]:
    """Split a response into turns: runs of tokens in the loss (1), between the answers of a tool or environment (0).

    >>> turns_in([1, 1, 0, 0, 0, 1, 0, 1])
    [range(0, 2), range(5, 8)]
    """
    turns: list[range] = []
    for position in (at for at, is_in in enumerate(mask) if is_in):
        if turns and position - turns[-1].stop < _SHORTEST_ANSWER:
            turns[-1] = range(turns[-1].start, position + 1)
        else:
            turns.append(range(position, position + 1))
    return turns


@dataclass(frozen=True)
class Turn:
    """One turn of a response: what the model wrote between two answers of a tool."""

    number: Count = 1
    """From 1."""
    num_turns: Count = 1
    num_before: Count = 0
    """Tokens of the tool's answer right before it, which are left out of the loss."""


@dataclass(frozen=True)
class Culprit:
    """A span of one response that carries the spike."""

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
    data_row: Count | None = optional()
    """Row of the data set, where its rows have an ``index``."""
    versions: Interval | None = optional()
    """Steps whose weights sampled the first and the last token of its sequence; null where that is not known."""
    reward: float | None = None
    """Sum of the sequence's token-level scores."""
    token_ids: tuple[int, ...] | None = never_null()
    """Token ids of the span; empty where the row's positions are no tokens, as a classifier's or a picture's."""
    tokens: tuple[str, ...] | None = None
    """Text of each token; null, as all text here, when the run keeps none."""
    text_before: str | None = None
    text_after: str | None = None
    prompt: str | None = None
    values: Annotated[dict[str, float], BY_COLUMN] = field(default_factory=dict)
    """The row of the table of tokens at ``peak``, by column; what is not known is left out."""
    sequence_ratio: float | None = None
    """Geometric mean of the ratio over the sequence's response tokens, with the old log-prob as the loss used it."""
    grad_norm: float | None = None
    """L2 norm of the span's part of the gradient."""
    is_exact: bool = True
    """Whether a backward of its own measured grad_norm, which else is a lower bound."""
    threshold: float | None = None
    """The norm from which the span counts as a culprit."""
    share: float | None = None
    """<g, G> / ||G||^2; the shares of all tokens add up to 1. Null when the spike is not finite."""
    share_error: float | None = optional()
    """Standard error of the share; 0 where a backward of its own measured it."""
    layers: dict[str, float] = field(default_factory=dict)
    """Norm of the span's part of the gradient per layer; empty unless is_exact."""
    cause: Cause = field(default_factory=Cause)
    token_norms: tuple[float, ...] | None = optional()
    """Norm of each position's own gradient, or a lower bound where there are several; null where none is known."""
    siblings: tuple[Sibling, ...] | None = optional()
    """The other responses to its prompt; null without a uid."""
    turn: Turn | None = optional()
    """Turn in which the span begins; null where the response has a single one."""

    def at(self, column: str) -> float | None:
        """Return a column of the table of tokens at ``peak``; None where it is not known."""
        return columns.value(self.values, column)

    def size(self, has_share: bool) -> tuple[float, float]:
        """Return (|share|, |norm|) to sort by, 0 without shares; infinity where one is not finite or not known."""
        values = (self.share if has_share else 0.0, self.grad_norm)
        share, norm = (abs(value) if value is not None and math.isfinite(value) else math.inf for value in values)
        return share, norm

    @property
    def text(self) -> str:
        """Return the span's text; where the run kept none, its first token numbers."""
        return "".join(self.tokens or ()) or " ".join(f"<{token}>" for token in (self.token_ids or ())[:20])


# ---- proof, action, consequence

ACTIONS = ("observe", "mask", "heal", "skip", "abort")
"""Actions on a step that spiked."""


@dataclass(frozen=True)
class Certificate:
    """Proof by the gradient's norm with and without the culprits."""

    norm_before: float | None = never_null()
    """Norm of the gradient with the culprits, before clipping."""
    norm_after: float | None = None
    """Norm without them, measured; null where a part was not searched."""
    error_bound: float | None = None
    """Largest error of norm_after; null with it."""
    threshold: float | None = None
    """The trigger's threshold; null on a rehearsal."""
    method: Annotated[str, ("enum", ("subtract", "swap", "recompute", "none"))] = "none"
    verdict: Annotated[str, ("enum", VERDICTS)] = "undecided"
    reason: str = ""
    replay_difference: float | None = optional()
    """L2 norm by which two replays differ: of the culprits alone (subtract; their rounding, too), of all of their
    micro-batches (swap), of one without culprits (recompute); 0: kernels repeat, null: nothing was replayed twice."""


@dataclass(frozen=True)
class Action:
    """The requested action and the one taken."""

    requested: Annotated[str, ("enum", ACTIONS)] = "observe"
    taken: Annotated[str, ("enum", ACTIONS)] = "observe"
    reason: str = ""


@dataclass(frozen=True)
class Cured:
    """The step's gradient under another setting."""

    name: str = ""
    """Name in the table of actions."""
    line: str = ""
    """The setting, as a line of the trainer's config."""
    norm_after: float | None = never_null()
    """Measured where forwards is over 0; else at least this, by its coefficients and the shares."""
    error_bound: float | None = None
    """Largest error of norm_after; null where that is a bound itself."""
    verdict: Annotated[str, ("enum", ("healed", "not_healed", "undecided", "no_change"))] = "undecided"
    """no_change: no coefficient would have changed."""
    kept: float | None = None
    """Cosine between that gradient and the one without the culprits, or the spike's own where no token is one."""
    changed_tokens: float = 0.0
    """Share of the tokens whose coefficient changes."""
    forwards: Count = 0
    """Forwards of a micro-batch that the measurement took."""
    backwards: Count = 0


@dataclass(frozen=True)
class Consequence:
    """The gradient that the optimizer was given, and the culprits' part of it."""

    grad_clip: float | None = None
    """Norm that gradients are clipped to; null where each layer is clipped by itself."""
    clip_scale: float | None = None
    """Factor of clipping, in (0, 1]; null where no step was taken."""
    culprit_share: float | None = None
    """The culprits' share of the gradient that the optimizer was given; null where it is not known."""
    healthy_norm: float | None = None
    """Norm of the other tokens' part of the clipped gradient."""
    last_checkpoint: str | None = None
    """The newest checkpoint before this step."""
    is_taken: bool | None = optional()
    """Whether the optimizer took a step, finite or not; null in records before this was noted: of verl, which takes
    none that is not finite."""


@dataclass(frozen=True)
class StepCause:
    """Cause of the whole step: the largest culprit's, or another where no token made the spike."""

    label: Annotated[str, ("enum", CAUSES)] = "unknown"
    reason: str = ""
    """The cause in words; empty for a culprit's cause."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Evidence for the cause."""
    names: tuple[str, ...] = ()
    """Parameters, or tensors of the batch: the most suspect first."""
    places: tuple[tuple[Count | None, Count], ...] = ()
    """Rows of the trainer's batch and response positions, where only a few are concerned."""


FAULTS = ("batch", "last_update", "weights", "after_backward", "undecided")
"""The links of a step: the batch, the update before it, the weights, what changes a gradient before the optimizer."""


@dataclass(frozen=True)
class Fault:
    """The link of the step that broke."""

    at: Annotated[str, ("enum", FAULTS)] = "undecided"
    """Which link; docs/spikes-without-tokens.md has the rule."""
    label: Annotated[str, ("enum", CAUSES)] | None = None
    """The cause; null where the batch is at fault, whose culprits have causes of their own."""
    parameters: tuple[str, ...] = ()
    """Parameters, the most suspect first."""
    step: Count | None = None
    """Step whose update broke it, or since which the weights are wrong; the spike's own where the batch is at fault."""
    evidence: dict[str, float | None] = field(default_factory=dict)
    """Norms that were measured, and ratios to what is usual in this run."""
    reason: str = ""
    """The fault in words."""


@dataclass(frozen=True)
class Rerun:
    """The spike's micro-batches run again unchanged."""

    norm: float | None = never_null()
    difference: float | None = never_null()
    """Norm of the difference of both gradients, over the spike's norm."""
    is_reproduced: bool = True
    """Whether the norm came back: where not, hardware or a race made the spike."""


@dataclass(frozen=True)
class FirstNotFinite:
    """Module in which NaN or infinity first appears when a micro-batch is run again."""

    module: str = ""
    way: Annotated[str, ("enum", ("forward", "backward"))] = "forward"
    """Whether in its output, or in the gradient that comes back to its output."""
    before: dict[str, float] = field(default_factory=dict)
    """Largest |value| of the last outputs, or gradients of outputs, that are finite, by module; the last one last."""


@dataclass(frozen=True)
class LayerHistory:
    """Each layer's norm against its own history, and how the layers' norms correlate."""

    num_steps: Annotated[int, ("minimum", 2)] | None = never_null()
    """Optimizer steps compared with."""
    excess: dict[str, float] = field(default_factory=dict)
    """Norm over the median of the layer's own history."""
    spread: float | None = never_null()
    """Largest excess over the median layer's."""
    mean_correlation: float | None = never_null()
    """Mean over pairs of layers of the correlation over time of their log-norms, in [-1, 1]."""


@dataclass(frozen=True)
class PartShare:
    """Share of the spike of one row, one prompt's rollouts or one data source."""

    name: str | None = never_null()
    """The row of the batch as it was dispatched, the prompt's uid, or the data source."""
    share: float = 0.0
    """Sum of its tokens' shares."""
    share_error: float = 0.0
    """Standard error of the share."""
    num_rows: Count = 0
    num_tokens: Count = 0


@dataclass(frozen=True)
class Shares:
    """Measured shares of the spike by micro-batch and rank; where they are trusted, also by what is in the batch: of
    each kind the sixteen largest at most, null where the trainer does not say."""

    closure: float | None = never_null()
    """Sum of all measured shares: 1 when the measurement is right, less where it left quiet micro-batches out."""
    closure_error: float | None = optional()
    """Standard error of closure: the noise of what was read, and what quiet micro-batches carry that were left out."""
    is_trusted: bool = True
    """Whether shares are exact and make up the spike, as far as half precision leaves a gradient as it is."""
    micro_batches: tuple[tuple[float, ...], ...] = ()
    """Shares by micro-batch and rank."""
    rows: tuple[PartShare, ...] | None = optional()
    prompts: tuple[PartShare, ...] | None = optional()
    sources: tuple[PartShare, ...] | None = optional()


@dataclass(frozen=True)
class Mismatch:
    """Tokens at which the rollout engine's log-prob and the trainer's before the update differ by more than noise."""

    noise: float = 0.0
    """Noise of logits, nats: 1.48 times the batch's median |difference| / (1 - p), at most that of bfloat16 kernels."""
    token_share: float = 0.0
    """Share of the response tokens that differ by over eight times the noise and 0.2 nats."""
    spike_share: float = 0.0
    """Their share of the spike, within the sequences kept token by token."""


@dataclass(frozen=True)
class BatchStatistics:
    """Typical values in the batch, with which causes compare a culprit."""

    advantage: float = 0.0
    """Median |advantage| over the response tokens whose advantage is not zero."""
    one_minus_prob: float = 0.0
    """Mean of 1 - pi_old over response tokens (arXiv 2505.12929: a token's gradient goes with 1 - pi)."""
    jacobian: float | None = None
    """Norm of a typical token's log-prob gradient: residual norm over the root sum of squared coefficients."""
    layer_spread: float | None = None
    """See layer_history.spread."""
    low_entropy: float | None = optional()
    """Entropy that a fifth of the tokens are under; null where the entropies are not known."""
    over_run: dict[str, float] | None = optional()
    """Multiples of the run's typical advantage, coefficient, length of a response, and tokens of a batch. Null until
    there is a history."""
    entropy_over_policy: float | None = optional()
    """Root sum of squares of d loss / d entropy over that of d loss / d log_prob, over all tokens."""
    value_error: float | None = optional()
    """Critic: median |return - value before the update| over the response tokens."""
    teacher_gap: float | None = optional()
    """Distillation: median |teacher's log-prob - student's before the update| over the response tokens."""
    loss_weight: float | None = optional()
    """Loop without advantages: median |d loss / d log_prob| times the number of tokens, which is 1 for the mean of the
    tokens' negative log-probs."""
    kl_over_policy: float | None = optional()
    """Root sum of squares of the KL term's coefficients over that of the other terms'."""


@dataclass(frozen=True)
class Event:
    """A localized gradient spike: one line of events.jsonl."""

    schema_version: EventVersion = EVENT_VERSION
    event_id: Annotated[str, ("minLength", 1)] = ""
    verdict: str | None = never_null()
    """The verdict in a few sentences."""
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
    """Norm of the spike's gradient per kind of module."""
    layer_history: LayerHistory | None = None
    """Null where the layers' norms are not tracked, or not yet."""
    shares: Shares | None = None
    """Null when they were not measured."""
    mismatch: Mismatch | None = optional()
    """Null where a log-prob of the two is not known, or the shares are not, or cannot be trusted."""
    batch: BatchStatistics = BatchStatistics()
    cause: StepCause | None = optional()
    fault: Fault | None = optional()
    """Null in records from before faults were looked for."""
    rerun: Rerun | None = optional()
    """Null where it was not asked for."""
    first_not_finite: FirstNotFinite | None = optional()
    """Null where the gradient is finite, or where it was not looked for or found."""
    cures: tuple[Cured, ...] | None = optional()
    """Settings under which the step was measured, or whose coefficients settled it; most useful first. Null where none
    was tried."""
    consequence: Consequence | None = optional()
    model: Annotated[str, ("enum", ("actor", "critic"))] | None = optional()
    """Model whose gradient it is; null for the actor."""
    head_grad_norm: float | None = optional()
    """Norm of the spike's gradient at the output head (at the embedding where the two are tied), before clipping: a
    lower bound on how far such a step moves the policy (arXiv 2605.19425)."""
    folder: str | None = None
    """Folder with batch.safetensors, meta.json and sequences.json, relative to events.jsonl."""

    @cached_property
    def by_size(self) -> list[Culprit]:
        """Return the culprits, largest first: by share where each has one, else by norm.

        What is not finite, or not known, comes first.
        """
        has_shares = all(culprit.share is not None for culprit in self.culprits)
        return sorted(self.culprits, key=lambda culprit: culprit.size(has_shares), reverse=True)

    @property
    def leader(self) -> Culprit | None:
        """Return the largest culprit; None without any."""
        return next(iter(self.by_size), None)

    @property
    def is_distilled(self) -> bool:
        """Return whether distillation is the whole loss: no reward or advantage is part of it."""
        return self.batch.teacher_gap is not None

    @property
    def is_supervised(self) -> bool:
        """Return whether the loss has no advantages: its tokens have weights, and its rows are documents."""
        return self.batch.loss_weight is not None

    @property
    def is_without_tokens(self) -> bool:
        """Return whether the culprits' positions are no tokens, as a classifier's rows or a picture's patches."""
        return bool(self.culprits) and all(culprit.token_ids == () for culprit in self.culprits)
