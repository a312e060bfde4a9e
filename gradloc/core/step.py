# SPDX-License-Identifier: Apache-2.0
"""One optimizer step that can be run again: the base of every trainer's step, and the records it keeps.

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
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..record import Fault
from .forward_state import RngState


class Outputs(NamedTuple):
    """Outputs of one micro-batch's forward that the loss is made of."""

    log_prob: torch.Tensor
    """(B, T); of a critic the values."""
    entropy: torch.Tensor | None = None
    """(B, T), in nats; None if none was computed."""
    auxiliary: torch.Tensor | None = None
    """A scalar of the loss that passes through no token, such as a router's balancing loss; None without any."""

    def at(self, rows: list[int] | None) -> "Outputs":
        """Return some rows of the tokens' outputs, without the auxiliary loss; None: return everything unchanged."""
        if rows is None:
            return self
        return Outputs(self.log_prob[rows], None if self.entropy is None else self.entropy[rows])


def stack_rows(parts: Sequence[Outputs]) -> Outputs:
    """Concatenate the rows of several micro-batches, padded with 0 on the right to the longest."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.log_prob.shape[1] for part in parts)

    def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([pad(value, (0, longest - value.shape[1])) for value in values])

    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Outputs(joined([part.log_prob for part in parts]), joined(entropies) if entropies else None)


@dataclass
class Recorded:
    """Outputs of one micro-batch's training forward on this rank, and the loss's derivatives by them."""

    rng: RngState
    """The random state before the forward."""
    log_prob: torch.Tensor = field(init=False)
    """(B, T), detached; set by the forward."""
    entropy: torch.Tensor | None = None
    """(B, T), detached; None if the forward computed none."""
    log_prob_coefficient: torch.Tensor | None = None
    """d loss / d log_prob (B, T) as the backward delivered it: of this rank's own loss, times its fp16 scale."""
    entropy_coefficient: torch.Tensor | None = None
    """d loss / d entropy (B, T), in the same unit; None if entropy is no part of the loss."""
    auxiliary_coefficient: torch.Tensor | None = None
    """d loss / d auxiliary, a scalar in the same unit."""
    is_value: bool = False
    """Whether this is a critic's step: values take the place of log-probs everywhere, and there is no entropy."""
    score: torch.Tensor | None = None
    """(B, T), where the loss is no function of log-probs and entropies: the number that a search's forward returns in
    place of log-probs, at training's weights. :attr:`log_prob_coefficient` is then d loss / d score."""
    is_known: bool = True
    """Whether :attr:`log_prob` holds log-probs; it holds zeros where the loss is made of none."""
    is_entropy: bool = True
    """Whether :attr:`entropy_coefficient` belongs to an entropy. If not, a search's forward returns another part of the
    loss in its place, such as label smoothing."""

    def hook(self, outputs: Outputs) -> None:
        """Keep the training forward's values, and hook them so that the backward leaves its coefficients here."""
        for name, value in outputs._asdict().items():
            if value is None:
                continue
            if name != "auxiliary":
                setattr(self, name, value.detach())
            if value.requires_grad:
                value.register_hook(partial(self._keep, f"{name}_coefficient"))

    def _keep(self, name: str, grad: torch.Tensor | None) -> None:
        if grad is None:  # of an output that the loss does not use, where a function has several
            return
        before = getattr(self, name)  # of another backward through the same forward
        setattr(self, name, grad.detach() if before is None else before + grad.detach())

    @property
    def readout(self) -> torch.Tensor:
        """Return the first output of a search's forward, at training's weights: (B, T)."""
        return self.log_prob if self.score is None else self.score

    @property
    def is_linear(self) -> bool:
        """Whether the readout enters the loss linearly; a log-prob is read as log-odds."""
        return self.is_value or self.score is not None

    def coefficients(self, weight: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return c_t and e_t (B, T), the derivatives of the step's unscaled loss over all ranks. c_t is zeros if no
        gradient reached the log-probs; e_t is None if entropy is no part of the loss.

        Args:
            weight: the step's :attr:`TrainingStep.weight`.
        """
        found, entropy = self.log_prob_coefficient, self.entropy_coefficient
        log_prob = torch.zeros_like(self.log_prob) if found is None else found * weight
        return log_prob, None if entropy is None else entropy * weight

    def pull(self, selected: torch.Tensor | None) -> Outputs:
        """Return coefficients whose backward adds the selected tokens' part of training's gradient to ``.grad``.

        Tokens outside get an exact 0, whatever their coefficient. The auxiliary loss keeps its whole coefficient.

        Args:
            selected: bool, or factors, (B, T); None for all, which gives training's gradient bit for bit.
        """
        log_prob = self.log_prob_coefficient
        if log_prob is None:  # zeros: a rank without a gradient still runs the collectives that its peers wait for
            log_prob = torch.zeros_like(self.log_prob)
        entropy = self.entropy_coefficient
        entropy = None if entropy is None else only(selected, entropy)
        return Outputs(only(selected, log_prob), entropy, self.auxiliary_coefficient)


def only(selected: torch.Tensor | None, coefficients: torch.Tensor) -> torch.Tensor:
    """Return coefficients (B, T) that are 0 outside of the selected tokens, even where they were inf or NaN.

    Args:
        selected: bool, or factors to multiply by, of a shape that broadcasts; None for all.
    """
    if selected is None:
        return coefficients
    if selected.is_floating_point():
        return torch.where(selected != 0, coefficients * selected.to(coefficients.dtype), 0.0)
    return torch.where(selected, coefficients, 0.0)


def run_backward(outputs: Any, pull: Any) -> None:
    """Run the backward of a pass, from the outputs of a forward that has a graph.

    Every output of training's own backward gets its coefficient at the same place of the graph, so the kernels behind
    it run on the same values in the same order.

    Args:
        outputs: of :meth:`TrainingStep.forward`.
        pull: their coefficients; of a step whose forward returns other outputs a function that runs the backward.
    """
    if not isinstance(pull, Outputs):
        pull(outputs)
        return
    roots, coefficients = [], []
    for value, coefficient in zip(outputs, pull, strict=True):
        if value is not None and coefficient is not None and value.requires_grad:
            roots.append(value)
            coefficients.append(coefficient.to(value.dtype).view_as(value))
    torch.autograd.backward(roots, coefficients)


@dataclass(frozen=True)
class Details:
    """Values of a micro-batch that only an event's record shows; None where the trainer does not have them."""

    old_log_prob: torch.Tensor | None = None
    """(B, T): the importance ratio's denominator, as the loss used it."""
    weights: torch.Tensor | None = None
    """float (B, T): each token's weight in the whole step's loss, 1/N for a mean over N tokens."""


@dataclass
class MicroBatch:
    """One forward and backward of an optimizer step."""

    inputs: Any
    """The rows as the trainer's forward and loss take them."""
    recorded: Recorded


class TrainingStep:
    """One optimizer step that can be run again: its micro-batches, recorded while training ran them.

    A search asks a trainer for nothing else, and never for a loss. A rank's micro-batches are numbered from 0
    in training's order. A subclass runs the forward, and reads rows and mask off the inputs.

    Args:
        device: of the model.
        num_ranks: data-parallel ranks, over which gradients are averaged.
        backward_factor: what the gradient is multiplied by between backward and clipping: fp16's 1 / loss scale.
    """

    dtype = torch.float32
    """The forward's dtype; weights and gradients may be finer."""
    temperature = 1.0
    """The logits were divided by this."""
    is_value = False
    """Whether this is a critic's step: its values take the place of log-probs."""
    micro_batch_class = MicroBatch
    objection = ""
    """Why no search may trust the replayed gradient; empty where it may."""
    obstacle = ""
    """Why the optimizer cannot be given a gradient that is run again; empty where it can."""
    fault: Fault | None = None
    """Which link broke, where :attr:`objection` says it."""
    apart = 0.0
    """Norm of the difference between the replayed gradient and the optimizer's, before clipping."""
    unsearched: tuple[str, ...] = ()
    """Parameters whose gradient is not searched: they are used behind what is recorded."""
    unsearched_norm = 0.0
    """Norm of the gradient of :attr:`unsearched`."""
    spent = 0, 0
    """Forwards and backwards of a micro-batch that were run before the search."""

    def __init__(self, device: torch.device, num_ranks: int, backward_factor: float = 1.0):
        self.device, self.num_ranks, self.backward_factor = device, num_ranks, backward_factor
        self.micro_batches: list[Any] = []
        """Each has ``recorded``; see :class:`MicroBatch`."""

    # ---- recording, while training runs

    def before_forward(self, inputs: Any) -> None:
        """Keep the next micro-batch and the random state before its forward."""
        recorded = Recorded(RngState(self.device), is_value=self.is_value)
        self.micro_batches.append(self.micro_batch_class(inputs, recorded))

    def after_forward(self, outputs: Outputs) -> None:
        """Record the last micro-batch's outputs and hook them for their coefficients; changes nothing."""
        self.micro_batches[-1].recorded.hook(outputs)

    def kept(self) -> "TrainingStep":
        """Return the first micro-batch alone, to be run again at the weights of a later step."""
        found = copy.copy(self)
        found.micro_batches = self.micro_batches[:1]
        return found

    # ---- what a search asks

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def reduces_once(self) -> bool:
        """Whether training reduces the gradient over ranks only after the last micro-batch."""
        return False

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (fp16), and so on what a backward adds to ``.grad``."""
        return 1.0 / self.backward_factor

    @property
    def weight(self) -> float:
        """The factor from a recorded coefficient to a derivative of the step's unscaled loss over all ranks, which
        average their gradients.
        """
        return self.backward_factor / self.num_ranks

    def recorded(self, micro_batch: int) -> Recorded:
        """Return what the training pass left."""
        return self.micro_batches[micro_batch].recorded

    def rows(self, micro_batch: int) -> list[int]:
        """Return the rows' numbers in the driver's batch; empty where the driver sent none."""
        return []

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        """Return the response tokens of this rank's micro-batch, bool (B, T)."""
        raise NotImplementedError

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """Run the forward again at the present weights; the random state is training's already.

        With a graph where gradients are enabled: then it is training's forward. Without one, in half precision, the
        output head is applied in float32: log-probs rounded to bfloat16 would hide small moves.

        Args:
            micro_batch: its number.
            needs_entropy: also where the loss has no entropy term.
        """
        raise NotImplementedError

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one forward and backward of a pass that reduces over ranks when training would.

        If training reduces once, after the last micro-batch, so must a replay: otherwise its sums round differently.
        By default each micro-batch reduces.
        """
        return nullcontext()

    def forward_bytes(self) -> int:
        """Return the peak of :meth:`forward` without a graph, less the weights, in bytes: mostly float32 logits. With
        0, the default, no memory is reserved for it."""
        return 0

    def details(self, micro_batch: int) -> Details:
        """Return what only the record shows; by default nothing. Runs no forward."""
        return Details()


def backward_factor(scaler: Any) -> float:
    """Return what fp16's scaler will multiply this step's gradient by before it is clipped; 1 without a scaler."""
    return 1.0 if scaler is None else 1.0 / scaler.get_scale()


class Scheduled(ABC):
    """A :class:`TrainingStep` of an engine that schedules passes over micro-batches itself, such as a pipeline."""

    @abstractmethod
    def distribute_records(self) -> None:
        """Give the records to all processes of the rank; called before anything else. May communicate."""

    @abstractmethod
    def run_pass(self, pulls: Sequence[tuple[int, Outputs]]) -> None:
        """Fill ``.grad`` with the sum of these micro-batches' gradients, see :meth:`.probe.Prober.compute`."""


class ByRow(ABC):
    """A :class:`TrainingStep` that can run some rows of its micro-batches by themselves."""

    @abstractmethod
    def forward_rows(self, rows: Sequence[tuple[int, list[int]]]) -> Outputs:
        """Run training's forward with a graph on R rows, and return (R, T), padded on the right.

        Args:
            rows: pairs of a micro-batch and its rows' places in it, rising.
        """


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How the batch's advantages were made, as the driver knows it; some cures change that."""

    is_divided: bool = False
    """Whether a group's advantages were divided by the standard deviation of its rewards."""
    other_advantages: tuple[float, ...] = ()
    """Advantages with the division toggled, by the row's number in the driver's batch; empty where not known."""
    is_reweighted: bool = False
    """Whether they were scaled by the token's probability (Advantage Reweighting)."""
    refused_cures: frozenset[str] = frozenset()
    """Settings that this run would be refused with, and those that change more than the loss, by name."""


MASK, NUM_TOKENS = "response_mask", "num_tokens"
"""Names of tensors that a cure may change: the tokens that stay in the loss, and their number over all ranks."""


class LossReplay(TrainingStep):
    """A step that also has the trainer's own loss, differentiated by what was recorded. Nothing here communicates."""

    trainer_name = ""
    """Name of the trainer in the advice, such as ``verl 0.9``; empty where it has none."""
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
        """Return this rank's loss of these log-probs and entropies, a scalar: unscaled, without the auxiliary loss.

        Args:
            micro_batch: its number.
            given: (B, T); entropies are None where training computed none.
            settings: in place of training's, by the trainer's dotted names.
            tensors: of the batch, (B, T), in place of training's, by the trainer's names; with another :data:`MASK`
                also :data:`NUM_TOKENS`, a scalar: the tokens in all ranks' masks of the mini-batch.
        """

    def setting(self, name: str) -> Any:
        """Return the present value of a setting that :meth:`loss_under` can change.

        Raises:
            LookupError, AttributeError: this loss has no such setting.
        """
        raise LookupError(name)

    def would_change(self, settings: Mapping[str, Any]) -> bool:
        """Return whether this loss has all of these settings, and at least one at another value."""
        try:  # in a list, so that every setting is looked up, also behind one that differs
            return any([self.setting(name) != value for name, value in settings.items()])
        except (LookupError, AttributeError):
            return False

    def tensors_under(self, name: str, micro_batch: int, groups: Groups | None) -> dict[str, torch.Tensor] | None:
        """Return the tensors (B, T) that the batch would have had under a cure that changes the batch and not the loss,
        by the trainer's names; :data:`MASK` where it takes tokens out. None where it is in force already, or unknown.

        Args:
            name: the cure's, in the advice.
            micro_batch: its number.
            groups: from the driver; None where it knows none.
        """
        return None

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        """Return d loss / d log_prob and d entropy, float32 (B, T), of this rank's own loss; the step's are their mean.
        Takes the arguments of :meth:`loss_under`, and runs no forward."""
        factor = self.loss_factor * self.weight * self.num_ranks
        return self._derivatives(micro_batch, settings, tensors, torch.Tensor.float, factor)

    def recorded_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Recorded:
        """Return the record that training would have left under these, bit for bit: the same forward, with the
        coefficients that its backward would have delivered. Takes the arguments of :meth:`loss_under`, and runs no
        forward."""
        found = copy.copy(self.recorded(micro_batch))
        derivatives = self._derivatives(micro_batch, settings, tensors, torch.Tensor.clone, self.loss_factor)
        found.log_prob_coefficient, found.entropy_coefficient, _ = derivatives
        return found

    @property
    def loss_factor(self) -> float:
        """The trainer's factor on the loss before it runs the backward, such as fp16's scale."""
        return 1 / (self.weight * self.num_ranks)

    def _derivatives(
        self,
        micro_batch: int,
        settings: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None,
        cast: Callable[[torch.Tensor], torch.Tensor],
        factor: float,
    ) -> Outputs:
        recorded = self.recorded(micro_batch)
        values = {name: getattr(recorded, name) for name in ("log_prob", "entropy")}
        leaves = {
            name: cast(value.detach()).clone().requires_grad_() for name, value in values.items() if value is not None
        }
        with torch.enable_grad():
            loss = self.loss_under(micro_batch, Outputs(**leaves), settings, tensors or {})
            loss = loss if factor == 1.0 else loss * factor
        grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        return Outputs(**dict(zip(leaves, grads, strict=True)))


def kl_coefficients(step: Any, micro_batch: int) -> torch.Tensor | None:
    """Return d (this rank's KL term) / d log_prob (B, T), None without such a term: the loss less the loss without."""
    without = getattr(step, "without_kl", None)
    if without is None:
        return None
    whole = step.coefficients_under(micro_batch, {}).log_prob
    return whole - step.coefficients_under(micro_batch, without).log_prob


def has_finite_loss(step: Any, micro_batch: int) -> bool:
    """Return whether this rank's derivatives by log-probs and entropies are finite, before fp16's scale where the
    trainer knows its loss. Runs no forward."""
    if isinstance(step, LossReplay) and step.knows_loss:
        found: Sequence[torch.Tensor | None] = step.coefficients_under(micro_batch, {})
    else:
        found = step.recorded(micro_batch).coefficients(1.0)
    return all(bool(each.isfinite().all()) for each in found if each is not None)


def typical_sizes(step: Any, micro_batch: int) -> torch.Tensor:
    """Return |d loss / d log_prob| (B, T), in a unit that all steps of a run share. A step may measure that itself."""
    own = getattr(step, "typical_sizes", None)
    if own is not None:
        return own(micro_batch)
    return step.recorded(micro_batch).coefficients(step.weight)[0]
