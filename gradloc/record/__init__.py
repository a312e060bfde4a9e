# SPDX-License-Identifier: Apache-2.0
"""What GradLoc writes to disk about a spike, and nothing else: the one definition of these files.

``events.jsonl`` holds one :class:`Event` a line, whose folder :mod:`.bundle` describes. The writer fills these classes,
the report and the replay read them, and the JSON Schemas in ``schema/`` are made from them
(``scripts/make_schemas.py``).

Standard library only. On disk, numbers that JSON cannot spell are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``. A reader passes over fields that it does not know, and takes a field's default where a file lacks it;
so a name that a later version adds to an ``enum`` is no reason to refuse a file.

``Annotated`` carries what the schema says beyond the type: pairs of a JSON Schema keyword and its value.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from . import columns

SCHEMA_VERSION = 1
"""Of the files that have no version of their own."""
EVENT_VERSION = 2
"""Of an event and of its table of tokens. A file of version 1 is read through :mod:`.version1`."""
VERDICTS = ("explained", "undecided", "not_explained")

Version = Annotated[int, ("const", SCHEMA_VERSION)]
EventVersion = Annotated[int, ("const", EVENT_VERSION)]
Count = Annotated[int, ("minimum", 0)]
BY_COLUMN = ("propertyNames", "columns")
"""Says of an object that its names are those of stored columns of the table of tokens."""
Interval = tuple[Count, Count]


def never_null() -> Any:
    """Default of a field that the writer always knows: None only where a reader found a file without it."""
    return field(default=None, metadata={"null": False})


def optional() -> Any:
    """Default of a field, None, that files of this schema version may lack."""
    return field(default=None, metadata={"required": False})


# ---- where a spike came, why it was looked into, and how its culprits were looked for

_PHASES = (
    *("micro_batch", "rank", "token", "share", "verify", "residual", "sketch", "coefficients", "bisect"),
    *("transient", "weights", "scale", "others", "fault"),
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


# ---- a culprit, and why its gradient is large

CAUSES = (
    *("token_mismatch", "sequence_mismatch", "layer_heterogeneity", "large_jacobian", "extreme_advantage"),
    *("low_probability", "kl_term", "entropy_term", "is_weight", "value_outlier", "teacher_gap", "non_finite"),
    *("spurious_token", "loss_weight", "unexpected_token", "odd_document", "duplicate_document", "shifted_labels"),
    *("padding_trained", "not_sampled", "shifted_log_probs", "non_finite_forward", "non_finite_backward"),
    *("non_finite_padding", "non_finite_weights", "replicas_differ", "batch_scale", "not_tokens", "transient"),
    *("gradient_changed", "gradient_scaled", "update_too_large", "learning_rate_jumped", "weight_decay"),
    *("second_moments", "moments_lost", "weights_changed", "weights_grown"),
    "unknown",
)
"""From ``non_finite_padding`` to ``weights_grown`` they are of the whole step, and no token's: see StepCause."""


@dataclass(frozen=True)
class Cause:
    """Why the culprit's gradient is large."""

    label: Annotated[str, ("enum", CAUSES)] = "unknown"
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What says so: mostly how many times typical each factor of the gradient is."""


@dataclass(frozen=True)
class Sibling:
    """Another response to the culprit's prompt: an advantage is only as odd as its group."""

    row: Count = 0
    sequence_id: str | None = None
    reward: float | None = None
    advantage: float | None = None
    """Of its first response token."""
    num_tokens: Count = 0


_SHORTEST_ANSWER = 2  # tokens: a single one that is left out of the loss is no tool's answer


def turns_in(mask: Iterable[float]) -> list[range]:
    """The turns of a response: runs of tokens in the loss, between those that a tool or the environment answered (0).

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
    """Which part of a response of several turns: what the model wrote between two answers of a tool."""

    number: Count = 1
    """From 1."""
    num_turns: Count = 1
    num_before: Count = 0
    """Tokens right before it that are left out of the loss: the answer."""


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
    """Of the data set, where its rows say their ``index``."""
    versions: Interval | None = optional()
    """The steps whose weights sampled its sequence's first token and its last; null where the trainer does not say."""
    reward: float | None = None
    """The sequence's: sum of its token-level scores."""
    token_ids: tuple[int, ...] | None = never_null()
    """Of the span."""
    tokens: tuple[str, ...] | None = None
    """Text of each of them; null, as all text here, when the run keeps none."""
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
    """Whether grad_norm was measured by a backward of its own; else it is a lower bound."""
    threshold: float | None = None
    """The norm from which the span counts as a culprit."""
    share: float | None = None
    """<g, G> / ||G||^2; the shares of all tokens add up to 1. Null when the spike is not finite."""
    share_error: float | None = optional()
    """Its standard error; 0 where it was measured by a backward of its own."""
    layers: dict[str, float] = field(default_factory=dict)
    """Norm of the span's part of the gradient per layer; empty unless is_exact."""
    cause: Cause = field(default_factory=Cause)
    token_norms: tuple[float, ...] | None = optional()
    """Norm of each position's own gradient, or a lower bound where there are several; null where none is known."""
    siblings: tuple[Sibling, ...] | None = optional()
    """The other responses to its prompt; null without a uid."""
    turn: Turn | None = optional()
    """The one that the span begins in; null where the response has a single one."""

    def at(self, column: str) -> float | None:
        """Return a column of the table of tokens at ``peak``; None where it is not known."""
        return columns.value(self.values, column)

    def size(self, has_share: bool) -> tuple[float, float]:
        """Return its share, where that counts, and its norm; infinity for what is not finite or not known."""
        values = (self.share if has_share else 0.0, self.grad_norm)
        share, norm = (abs(value) if value is not None and math.isfinite(value) else math.inf for value in values)
        return share, norm

    @property
    def text(self) -> str:
        """The span's text; where the run kept none, its first token numbers."""
        return "".join(self.tokens or ()) or " ".join(f"<{token}>" for token in (self.token_ids or ())[:20])


# ---- what was measured of the spike, and what was done

ACTIONS = ("observe", "mask", "heal", "skip", "abort")
"""What may happen to the step that spiked."""


@dataclass(frozen=True)
class Certificate:
    """The gradient's norm with and without the culprits, and what that proves."""

    norm_before: float | None = never_null()
    norm_after: float | None = never_null()
    error_bound: float | None = never_null()
    """Largest error of norm_after."""
    threshold: float | None = None
    """The trigger's; null on a rehearsal."""
    method: Annotated[str, ("enum", ("subtract", "swap", "recompute", "none"))] = "none"
    verdict: Annotated[str, ("enum", VERDICTS)] = "undecided"
    reason: str = ""
    replay_difference: float | None = optional()
    """L2 norm by which two replays differ: of the culprits alone (subtract; their rounding, too), of all of their
    micro-batches (swap), of one without culprits (recompute); 0: kernels repeat, null: nothing was replayed twice."""


@dataclass(frozen=True)
class Action:
    """The action that was set, and the one that was taken."""

    requested: Annotated[str, ("enum", ACTIONS)] = "observe"
    taken: Annotated[str, ("enum", ACTIONS)] = "observe"
    reason: str = ""


@dataclass(frozen=True)
class Cured:
    """What the step's gradient would have been under another setting."""

    name: str = ""
    """In the table of advice."""
    line: str = ""
    """The setting, as a line of the trainer's config."""
    norm_after: float | None = never_null()
    """Measured where forwards is over 0; else at least this, by its coefficients and the shares."""
    error_bound: float | None = None
    """Largest error of norm_after; null where that is a bound itself."""
    verdict: Annotated[str, ("enum", ("healed", "not_healed", "undecided", "no_change"))] = "undecided"
    """no_change: no coefficient would have been another one."""
    kept: float | None = None
    """Cosine between that gradient and the one without the culprits, or the spike's own where no token is one."""
    changed_tokens: float = 0.0
    """Share of the tokens whose coefficient is another one."""
    forwards: Count = 0
    """Of a micro-batch, that measuring it took."""
    backwards: Count = 0


@dataclass(frozen=True)
class Consequence:
    """What the optimizer was given, and what of that was the culprits'."""

    grad_clip: float | None = None
    """The norm that gradients are clipped to; null where layers are clipped each by itself."""
    clip_scale: float | None = None
    """What clipping multiplied the gradient with, in (0, 1]; null where no step was taken."""
    culprit_share: float | None = None
    """Of the gradient that the optimizer was given, as its shares add up; null where they are not known."""
    healthy_norm: float | None = None
    """Norm of the other tokens' part of the clipped gradient."""
    last_checkpoint: str | None = None
    """The newest checkpoint before this step."""
    is_taken: bool | None = optional()
    """Whether the optimizer took a step, finite or not; null in records before this was noted: of verl, which takes
    none that is not finite."""


@dataclass(frozen=True)
class StepCause:
    """Why the step spiked: what its largest culprit's cause is, or what made it where no token did."""

    label: Annotated[str, ("enum", CAUSES)] = "unknown"
    reason: str = ""
    """In words; empty where it is a culprit's cause."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What says so."""
    names: tuple[str, ...] = ()
    """Parameters, or tensors of the batch: the most suspect first."""
    places: tuple[tuple[Count | None, Count], ...] = ()
    """Rows of the trainer's batch and response positions, where it is about a few."""


FAULTS = ("batch", "last_update", "weights", "after_backward", "undecided")
"""The links of a step: the batch, the update before it, the weights, what changes a gradient before the optimizer."""


@dataclass(frozen=True)
class Fault:
    """Which link of the step broke."""

    at: Annotated[str, ("enum", FAULTS)] = "undecided"
    label: Annotated[str, ("enum", CAUSES)] | None = None
    """The cause; null where the batch is at fault, whose culprits have causes of their own."""
    parameters: tuple[str, ...] = ()
    """The most suspect first."""
    step: Count | None = None
    """The step whose update it was, or from which on the weights are so."""
    evidence: dict[str, float | None] = field(default_factory=dict)
    """Norms that were measured, and ratios to what is usual in this run."""
    reason: str = ""
    """In words."""


@dataclass(frozen=True)
class Rerun:
    """The spike's micro-batches run again as they were."""

    norm: float | None = never_null()
    difference: float | None = never_null()
    """Norm of the difference of both gradients, over the spike's norm."""
    is_reproduced: bool = True
    """Whether the norm came back: where not, hardware or a race made the spike."""


@dataclass(frozen=True)
class FirstNotFinite:
    """Where in the model NaN or infinity first appears, when a micro-batch is run again."""

    module: str = ""
    way: Annotated[str, ("enum", ("forward", "backward"))] = "forward"
    """Whether in its output, or in the gradient that comes back to its output."""
    before: dict[str, float] = field(default_factory=dict)
    """Largest |value| of the last outputs, or gradients of outputs, that are finite, by module; the last one last."""


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
class PartShare:
    """What one row, one prompt's rollouts or one data source carry of the spike."""

    name: str | None = never_null()
    """The row of the batch as it was dispatched, the prompt's uid, or the data source."""
    share: float = 0.0
    """Sum of its tokens' shares."""
    share_error: float = 0.0
    """Its standard error."""
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
    """One list per micro-batch, one share per rank."""
    rows: tuple[PartShare, ...] | None = optional()
    prompts: tuple[PartShare, ...] | None = optional()
    sources: tuple[PartShare, ...] | None = optional()


@dataclass(frozen=True)
class Mismatch:
    """Tokens at which the rollout engine's log-prob and the trainer's before the update differ by more than noise."""

    noise: float = 0.0
    """Of logits, nats: 1.48 times the batch's median |difference| / (1 - p), and at most what bfloat16 kernels make."""
    token_share: float = 0.0
    """Of the response tokens, those that differ by eight times that and by 0.2 nats."""
    spike_share: float = 0.0
    """What they carry of the spike in the sequences that are told token by token."""


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
    low_entropy: float | None = optional()
    """Entropy that a fifth of the tokens are under; null where the entropies are not known."""
    over_run: dict[str, float] | None = optional()
    """How many times what is typical of the run's own steps: advantage, coefficient, length of a response, tokens of
    the batch. Null until there is a history."""
    entropy_over_policy: float | None = optional()
    """Root sum of squares of d loss / d entropy over that of d loss / d log_prob, over all tokens."""
    value_error: float | None = optional()
    """Of a critic: median |return - value before the update| over the response tokens."""
    teacher_gap: float | None = optional()
    """Under distillation: median |teacher's log-prob - student's before the update| over the response tokens."""
    loss_weight: float | None = optional()
    """Of a loop that says no advantages: median |d loss / d log_prob| times the number of tokens, which is 1 for the
    mean of the tokens' negative log-probs."""
    kl_over_policy: float | None = optional()
    """The same of the KL term's part over the rest."""


@dataclass(frozen=True)
class Event:
    """A localized gradient spike: one line of events.jsonl."""

    schema_version: EventVersion = EVENT_VERSION
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
    """Settings under which the step was measured, or that a glance at their coefficients settled; most useful first.
    Null where none was tried."""
    consequence: Consequence | None = optional()
    model: Annotated[str, ("enum", ("actor", "critic"))] | None = optional()
    """Whose gradient it is; null for the actor's."""
    head_grad_norm: float | None = optional()
    """Norm of the spike's gradient at the output head (at the embedding where the two are tied), before clipping: a
    lower bound on how far such a step moves the policy (arXiv 2605.19425)."""
    folder: str | None = None
    """Folder with batch.safetensors, meta.json and sequences.json, relative to events.jsonl."""

    @cached_property
    def by_size(self) -> list[Culprit]:
        """The culprits, largest first: by share where each has one, else by norm.

        What is not finite, or not known, comes first.
        """
        has_shares = all(culprit.share is not None for culprit in self.culprits)
        return sorted(self.culprits, key=lambda culprit: culprit.size(has_shares), reverse=True)

    @property
    def leader(self) -> Culprit | None:
        """The largest culprit; None without any."""
        return next(iter(self.by_size), None)

    @property
    def is_distilled(self) -> bool:
        """Whether distillation is the whole loss: no reward or advantage is part of it."""
        return self.batch.teacher_gap is not None

    @property
    def is_supervised(self) -> bool:
        """Whether the loss has no advantages: its tokens have weights, and its rows are documents."""
        return self.batch.loss_weight is not None
