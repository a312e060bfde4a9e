# SPDX-License-Identifier: Apache-2.0
"""A culprit, and why its gradient is large."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from .fields import Count, Interval, never_null, optional

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
    "value_outlier",
    "teacher_gap",
    "non_finite",
    "spurious_token",
    "loss_weight",
    "unexpected_token",
    "odd_document",
    "duplicate_document",
    "shifted_labels",
    "padding_trained",
    "not_sampled",
    "shifted_log_probs",
    "non_finite_forward",
    "non_finite_backward",
    "non_finite_padding",
    "non_finite_weights",
    "replicas_differ",
    "batch_scale",
    "not_tokens",
    "transient",
    "unknown",
)
"""From ``non_finite_padding`` to ``transient`` they are of the whole step, and no token's: see StepCause."""


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
    """The token's weight in the aggregated loss; without advantages, minus its coefficient times the tokens' number."""
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
    value: float | None = optional()
    """What the critic predicts in the training forward; null where the event is the actor's, as the next two."""
    old_value: float | None = optional()
    """Before the update."""
    value_target: float | None = optional()
    """The return that the value is fitted to."""
    teacher_log_prob: float | None = optional()
    """The teacher's, where distillation is the whole loss; no advantage is then part of it."""
    turn: Turn | None = optional()
    """The one that the span begins in; null where the response has a single one."""

    @property
    def text(self) -> str:
        """The span's text; where the run kept none, its first token numbers."""
        return "".join(self.tokens or ()) or " ".join(f"<{token}>" for token in (self.token_ids or ())[:20])
