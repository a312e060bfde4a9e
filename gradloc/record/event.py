# SPDX-License-Identifier: Apache-2.0
"""One line of events.jsonl: what was measured of a spike, and what was done."""

from dataclasses import dataclass, field
from typing import Annotated

from .culprit import CAUSES, Culprit
from .fields import SCHEMA_VERSION, VERDICTS, Count, Version, never_null, optional
from .spike import Run, Search, Step, Trigger

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
    """What was asked for, and what was done with the step."""

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
    """Norm of what is left for all other tokens, after clipping."""
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
    """Whether closure is 1 within its error."""
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
    mismatch: Mismatch | None = optional()
    """Null where a log-prob of the two is not known, or the shares are not, or cannot be trusted."""
    batch: BatchStatistics = BatchStatistics()
    cause: StepCause | None = optional()
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

    @property
    def is_distilled(self) -> bool:
        """Whether distillation is the whole loss: no reward or advantage is part of it."""
        return self.batch.teacher_gap is not None

    @property
    def is_supervised(self) -> bool:
        """Whether the loss has no advantages: its tokens have weights, and its rows are documents."""
        return self.batch.loss_weight is not None
