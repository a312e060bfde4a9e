# SPDX-License-Identifier: Apache-2.0
"""What was measured of a spike, and what was done."""

from dataclasses import dataclass, field
from typing import Annotated

from .culprit import CAUSES
from .fields import Count, never_null, optional

JUDGED = ("explained", "undecided", "not_explained")
_MODES = ("observe", "mask", "skip", "abort")


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
    verdict: Annotated[str, ("enum", JUDGED)] = "undecided"
    reason: str = ""
    replay_difference: float | None = optional()
    """L2 norm by which two replays differ: of the culprits alone (subtract; their rounding, too), of all of their
    micro-batches (swap), of one without culprits (recompute); 0: kernels repeat, null: nothing was replayed twice."""


@dataclass(frozen=True)
class Action:
    """What was asked for, and what was done with the step."""

    requested: Annotated[str, ("enum", _MODES)] = "observe"
    taken: Annotated[str, ("enum", _MODES)] = "observe"
    reason: str = ""


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
class Shares:
    """Measured shares of the spike by micro-batch and rank."""

    closure: float | None = never_null()
    """Sum of all measured shares: 1 when the measurement is right, less where it left quiet micro-batches out."""
    closure_error: float | None = optional()
    """Standard error of closure: the noise of what was read, and what quiet micro-batches carry that were left out."""
    is_trusted: bool = True
    """Whether closure is 1 within its error."""
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
    low_entropy: float | None = optional()
    """Entropy that a fifth of the tokens are under; null where the entropies are not known."""
    over_run: dict[str, float] | None = optional()
    """How many times what is typical of the run's own steps: advantage, coefficient, length of a response, tokens of
    the batch. Null until there is a history."""
    entropy_over_policy: float | None = optional()
    """Root sum of squares of d loss / d entropy over that of d loss / d log_prob, over all tokens."""
    value_error: float | None = optional()
    """Of a critic: median |return - value before the update| over the response tokens."""
    kl_over_policy: float | None = optional()
    """The same of the KL term's part over the rest."""
