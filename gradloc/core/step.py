# SPDX-License-Identifier: Apache-2.0
"""One optimizer step that can be run again: what an adapter provides, and how a search reads it.

A token's gradient is g_t = c_t grad(log p_t) + e_t grad(H_t), with c_t = dL/dlog p_t, e_t = dL/dH_t and H_t the entropy
(docs/method.md, section 1). Hooks on log-prob and entropy take these coefficients from the training backward itself, so
they are right under any loss, however it clips or normalises. The gradient of any set of tokens is then one forward,
and a backward that begins with their coefficients: no loss is run again.

Shapes: B rows of the micro-batch, T response positions.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from .forward_state import RngState


class Outputs(NamedTuple):
    """What one micro-batch's forward gives the loss."""

    log_prob: torch.Tensor
    """(B, T); of a critic the values."""
    entropy: torch.Tensor | None = None
    """(B, T), in nats; None if none was computed."""
    beside: torch.Tensor | None = None
    """A scalar of the loss that passes through no token, such as a router's balancing loss; None without any."""

    def at(self, rows: list[int] | None) -> "Outputs":
        """These rows of what is (B, T); what passes through no token is no row's. None: all of it, as it is."""
        if rows is None:
            return self
        return Outputs(self.log_prob[rows], None if self.entropy is None else self.entropy[rows])


def below(parts: Sequence[Outputs]) -> Outputs:
    """The rows of several micro-batches one below the other, padded with 0 on the right to the longest."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.log_prob.shape[1] for part in parts)
    given = [[value for value in values if value is not None] for values in zip(*parts, strict=True)]
    wide = [[pad(value, (0, longest - value.shape[1])) for value in values] for values in given[:2]]
    return Outputs(torch.cat(wide[0]), torch.cat(wide[1]) if wide[1] else None)


@dataclass
class Recorded:
    """What the training forward and backward of one micro-batch left on this rank."""

    rng: RngState
    """The random state before the forward."""
    log_prob: torch.Tensor = field(init=False)
    """(B, T), detached; set by the forward."""
    entropy: torch.Tensor | None = None
    """(B, T), detached; None if the forward computed none."""
    log_prob_coefficient: torch.Tensor | None = None
    """d loss / d log_prob (B, T), of this rank's own loss, times its scale: as the backward delivered it."""
    entropy_coefficient: torch.Tensor | None = None
    """d loss / d entropy (B, T), likewise; None if entropy is no part of the loss."""
    beside_coefficient: torch.Tensor | None = None
    """d loss / d beside, a scalar, likewise."""
    is_value: bool = False
    """Whether this is a critic's step: values take the place of log-probs everywhere, and there is no entropy."""
    score: torch.Tensor | None = None
    """(B, T): what forwards of a search return in place of log-probs, as training had it, where the loss is no function
    of log-probs and entropies. :attr:`log_prob_coefficient` is then d loss / d score."""

    is_entropy: bool = True
    """Whether :attr:`entropy_coefficient` is of an entropy, and not of another part of the loss that forwards of a
    search return in its place, such as label smoothing."""

    @property
    def read(self) -> torch.Tensor:
        """(B, T): what forwards of a search return first, as training had it."""
        return self.log_prob if self.score is None else self.score

    @property
    def is_linear(self) -> bool:
        """Whether that number enters the loss as it is; a log-prob is read as log-odds."""
        return self.is_value or self.score is not None

    def coefficients(self, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """c_t and e_t (B, T): derivatives of the step's loss over all ranks, unscaled; c_t is zeros if no gradient
        reached the log-probs.

        Args:
            weight: the step's :attr:`Numerics.weight`.
        """
        found, entropy = self.log_prob_coefficient, self.entropy_coefficient
        log_prob = torch.zeros_like(self.log_prob) if found is None else found * weight
        return log_prob, None if entropy is None else entropy * weight

    def pull(self, selected: torch.Tensor | None) -> Outputs:
        """What a backward begins with, so that it adds the selected tokens' part of the training gradient to ``.grad``.

        Tokens outside get an exact 0, whatever their coefficient. What passes through no token comes in full.

        Args:
            selected: bool, or factors, (B, T); None for all, which gives training's gradient bit for bit.
        """
        log_prob = self.log_prob_coefficient
        if log_prob is None:  # zeros: a rank without a gradient still runs the collectives that its peers wait for
            log_prob = torch.zeros_like(self.log_prob)
        entropy = self.entropy_coefficient
        entropy = None if entropy is None else only(selected, entropy)
        return Outputs(only(selected, log_prob), entropy, self.beside_coefficient)


def only(selected: torch.Tensor | None, coefficients: torch.Tensor) -> torch.Tensor:
    """Coefficients (B, T) of the selected tokens, times their factors if ``selected`` holds factors; 0 elsewhere, where
    they may be inf or NaN."""
    if selected is None:
        return coefficients
    if selected.is_floating_point():
        return torch.where(selected != 0, coefficients * selected.to(coefficients.dtype), 0.0)
    return torch.where(selected, coefficients, 0.0)


def record(recorded: Recorded, outputs: Outputs) -> None:
    """Keep the training forward's values and hook it, so that the backward leaves the coefficients. Free of cost."""
    for name, value in outputs._asdict().items():
        if value is None:
            continue
        if name != "beside":
            setattr(recorded, name, value.detach())
        if value.requires_grad:
            value.register_hook(partial(_keep, recorded, f"{name}_coefficient"))


def _keep(recorded: Recorded, name: str, grad: torch.Tensor | None) -> None:
    if grad is None:  # of an output that the loss does not use, where a function has several
        return
    before = getattr(recorded, name)  # of another backward through the same forward
    setattr(recorded, name, grad.detach() if before is None else before + grad.detach())


def run_backward(outputs: Any, pull: Any) -> None:
    """The backward of a pass: from the outputs of a forward that has a graph, with these coefficients.

    A step whose forward returns something else than :class:`Outputs` pulls by a function of that.

    Every output of training's own backward gets its coefficient at the same place of the graph, so the kernels behind
    it run on the same values in the same order.
    """
    if not isinstance(pull, Outputs):
        pull(outputs)
        return
    pairs = [(value, each) for value, each in zip(outputs, pull, strict=True) if value is not None and each is not None]
    pairs = [(value, each.to(value.dtype).view_as(value)) for value, each in pairs if value.requires_grad]
    torch.autograd.backward([value for value, _ in pairs], [each for _, each in pairs])


@dataclass(frozen=True)
class Numerics:
    """The numbers of a step that a search reckons with."""

    dtype: torch.dtype = torch.float32
    """Of the forward; weights and gradients may be finer."""
    loss_scale: float = 1.0
    """The loss was multiplied by this (fp16), and so is what a backward adds to ``.grad``."""
    weight: float = 1.0
    """Times this, a recorded coefficient is a derivative of the step's loss over all ranks, unscaled: 1 / (ranks x
    :attr:`loss_scale`) where data-parallel ranks average their gradients."""
    temperature: float = 1.0
    """The logits were divided by this."""
    reduces_once: bool = False
    """Whether training reduces the gradient over ranks only after the last micro-batch."""


@dataclass(frozen=True)
class Details:
    """What only an event's record wants of a micro-batch; None where the trainer has no such thing."""

    old_log_prob: torch.Tensor | None = None
    """(B, T): the importance ratio's denominator, as the loss used it."""
    weights: torch.Tensor | None = None
    """float (B, T): how much each token's loss weighs in the whole step's loss, 1/N for a mean over N tokens."""


class TrainingStep(Protocol):
    """One optimizer step that can be run again: all that a search wants of a trainer. It never asks for a loss.

    The micro-batches of a rank are numbered from 0 in training's order.
    """

    num_micro_batches: int
    numerics: Numerics

    def rows(self, micro_batch: int) -> list[int]:
        """The rows' numbers in the driver's batch; empty if the driver did not say."""

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        """bool (B, T): the response tokens of this rank's micro-batch."""

    def recorded(self, micro_batch: int) -> Recorded:
        """What the training pass left."""

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """The forward again, at the present weights; the random state is training's already.

        With a graph where gradients are enabled: then it is training's forward. Without one, in half precision, the
        output head is applied in float32: log-probs rounded to bfloat16 would hide small moves.

        Args:
            micro_batch: its number.
            needs_entropy: also where the loss has no entropy term.
        """

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward of a pass: reduces over ranks when training would.

        If training reduces once, after the last micro-batch, so must a replay: otherwise its sums round differently.
        By default nothing is put off: each micro-batch reduces.
        """
        return nullcontext()

    def forward_bytes(self) -> int:
        """Peak of :meth:`forward` without a graph, beside the weights, in bytes: mostly float32 logits. With 0, the
        default, no memory is reserved for it."""
        return 0

    def details(self, micro_batch: int) -> Details:
        """For the record; by default nothing. Runs no forward."""
        return Details()


class Scheduled(ABC):
    """The part of a :class:`TrainingStep` that replaces ``in_pass`` in an engine that schedules the passes over
    micro-batches itself, such as a pipeline."""

    @abstractmethod
    def share(self) -> None:
        """Called first: give what was recorded to all processes of the rank. May communicate."""

    @abstractmethod
    def run_pass(self, pulls: Sequence[tuple[int, Outputs]]) -> None:
        """Fill ``.grad`` with the sum of these micro-batches' gradients, see :meth:`.probe.Prober.compute`."""


class ByRow(ABC):
    """A power of a :class:`TrainingStep` whose trainer can run some rows of its micro-batches by themselves."""

    @abstractmethod
    def forward_rows(self, rows: Sequence[tuple[int, list[int]]]) -> Outputs:
        """Training's forward with a graph, of these rows alone (R, T): of each micro-batch by their places in it,
        rising; of several one below the other, padded on the right."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What the driver tells of how the batch's advantages were made, for settings of which others follow."""

    is_divided: bool = False
    """Whether a group's advantages were divided by the standard deviation of its rewards."""
    other_advantages: tuple[float, ...] = ()
    """Each row's, had :attr:`is_divided` been the other way, by its number in the driver's batch. Empty where not
    known."""
    is_reweighted: bool = False
    """Whether they were scaled by the token's probability (Advantage Reweighting)."""
    refused_cures: frozenset[str] = frozenset()
    """Settings that this run would be refused with, and those that change more than the loss, by name."""


MASK, NUM_TOKENS = "response_mask", "num_tokens"
"""Among the tensors that a setting makes anew: the tokens that are left in the loss, and how many all ranks have."""


class LossReplay(ABC):
    """A power that a trainer may have: its own loss, differentiated by what was recorded. Nothing here communicates."""

    trainer_name = ""
    """By which the advice knows its lines, such as ``verl 0.9``; empty where there are none."""
    backward_factor = 1.0
    """What the gradient is multiplied by between backward and clipping."""
    knows_loss = True
    """Whether this step's loss is the trainer's own."""

    @property
    def without_kl(self) -> Mapping[str, Any] | None:
        """Settings under which the loss has no KL term; None if it has none anyway."""
        return None

    @property
    def without_entropy(self) -> Mapping[str, Any] | None:
        """Settings under which the loss has no entropy term; None if it has none anyway."""
        return None

    @abstractmethod
    def loss_under(
        self, micro_batch: int, given: Outputs, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """This rank's loss of these log-probs and entropies, a scalar, *not* scaled (fp16), without ``beside``.

        Args:
            micro_batch: its number.
            given: (B, T); entropies are None where training computed none.
            settings: the trainer's own, by its names, ``.`` between a block and what is in it; none: as in training.
            tensors: of the batch, (B, T), by the trainer's names, in place of training's; with another :data:`MASK`
                also :data:`NUM_TOKENS`, a scalar, what all ranks' masks of the mini-batch then hold.
        """

    def setting(self, name: str) -> Any:
        """The present value of what :meth:`loss_under` may be asked to change.

        Raises:
            LookupError, AttributeError: this loss has no such setting.
        """
        raise LookupError(name)

    def would_change(self, settings: Mapping[str, Any]) -> bool:
        """Whether this loss has all of these settings, and some at another value."""
        try:
            return any([self.setting(name) != value for name, value in settings.items()])
        except (LookupError, AttributeError):
            return False

    def tensors_under(self, name: str, micro_batch: int, groups: Groups | None) -> dict[str, torch.Tensor] | None:
        """What the batch would have held under a setting of the trainer's that is no loss's: tensors (B, T) by the
        trainer's names, :data:`MASK` where it takes tokens out. None where that is in force, or not known.

        Args:
            name: as in the advice.
            micro_batch: its number.
            groups: from the driver; None where it tells none.
        """
        return None

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        """d loss / d log_prob and d entropy, float32 (B, T), of this rank's own loss; the step's are their mean.
        Arguments as of :meth:`loss_under`. Runs no forward."""
        step: Any = self
        factor = self.loss_factor * step.numerics.weight * step.dp_size
        return self._derivatives(micro_batch, settings, tensors, torch.Tensor.float, factor)

    def recorded_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Recorded:
        """What the step would have left under these, bit for bit: the same forward, and the coefficients that the
        backward would have delivered. Arguments as of :meth:`loss_under`. Runs no forward."""
        step: Any = self
        found = copy.copy(step.recorded(micro_batch))
        derivatives = self._derivatives(micro_batch, settings, tensors, torch.Tensor.clone, self.loss_factor)
        found.log_prob_coefficient, found.entropy_coefficient, _ = derivatives
        return found

    @property
    def loss_factor(self) -> float:
        """What the trainer multiplies its loss with before it runs the backward, such as fp16's scale."""
        step: Any = self
        return 1 / (step.numerics.weight * step.dp_size)

    def _derivatives(
        self,
        micro_batch: int,
        settings: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None,
        kept: Callable[[torch.Tensor], torch.Tensor],
        factor: float,
    ) -> Outputs:
        step: Any = self
        recorded = step.recorded(micro_batch)
        values = {name: getattr(recorded, name) for name in ("log_prob", "entropy")}
        leaves = {
            name: kept(value.detach()).clone().requires_grad_() for name, value in values.items() if value is not None
        }
        with torch.enable_grad():
            loss = self.loss_under(micro_batch, Outputs(**leaves), settings, tensors or {})
            loss = loss if factor == 1.0 else loss * factor
        grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        return Outputs(**dict(zip(leaves, grads, strict=True)))


def kl_coefficients(step: Any, micro_batch: int) -> torch.Tensor | None:
    """d (this rank's KL term) / d log_prob (B, T): what the loss without the term lacks. None without such a term."""
    without = getattr(step, "without_kl", None)
    if without is None:
        return None
    whole = step.coefficients_under(micro_batch, {}).log_prob
    return whole - step.coefficients_under(micro_batch, without).log_prob


def has_finite_loss(step: Any, micro_batch: int) -> bool:
    """Whether this rank's derivatives by the log-probs and entropies are finite, before fp16's scale where the trainer
    can say that. Runs no forward."""
    if isinstance(step, LossReplay) and step.knows_loss:
        found: Sequence[torch.Tensor | None] = step.coefficients_under(micro_batch, {})
    else:
        found = step.recorded(micro_batch).coefficients(1.0)
    return all(bool(each.isfinite().all()) for each in found if each is not None)


def typical_sizes(step: Any, micro_batch: int) -> torch.Tensor:
    """Return |d loss / d log_prob| (B, T) in a unit that all steps of a run share; a step may have a measure of its own
    that healthy steps are known by."""
    own = getattr(step, "typical_sizes", None)
    if own is not None:
        return own(micro_batch)
    return step.recorded(micro_batch).coefficients(step.numerics.weight)[0]
