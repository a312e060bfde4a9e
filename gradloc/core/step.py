# SPDX-License-Identifier: Apache-2.0
"""One optimizer step that can be inspected and replayed: what an adapter provides, and how a search reads it.

A token's gradient is g_t = c_t grad(log p_t) + e_t grad(H_t), with c_t = dL/dlog p_t, e_t = dL/dH_t and H_t the entropy
(docs/method.md, section 1). Hooks on log-prob and entropy take these coefficients from the training backward itself, so
they are right under any loss, however it clips or normalises.

Shapes: B rows of the micro-batch, T response positions.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class RngState:
    """This process' random state: the CPU's, from which losses such as ``clip_cov`` draw, and the accelerator's."""

    def __init__(self, device: torch.device):
        self._module = None if device.type == "cpu" else torch.get_device_module(device.type)
        self.cpu = torch.get_rng_state()
        self.accelerator = None if self._module is None else self._module.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self._module is not None:
            self._module.set_rng_state(self.accelerator)


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
    is_value: bool = False
    """Whether this is a critic's step: values take the place of log-probs everywhere, and there is no entropy."""

    TENSORS = ("log_prob", "entropy", "log_prob_coefficient", "entropy_coefficient")


def record(recorded: Recorded, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
    """Keep the training forward's values and hook it, so that the backward leaves the coefficients. Free of cost."""
    recorded.log_prob = log_prob.detach()
    if log_prob.requires_grad:
        log_prob.register_hook(lambda grad: setattr(recorded, "log_prob_coefficient", grad.detach()))
    if entropy is not None:
        recorded.entropy = entropy.detach()
        if entropy.requires_grad:
            entropy.register_hook(lambda grad: setattr(recorded, "entropy_coefficient", grad.detach()))


def let_through(selected: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor | None:
    """Let gradient through at the selected positions only; the values stay the same, bit for bit.

    where() keeps a path for (zero) gradient even if nothing is selected. So a rank without a token of the set still
    runs the backward, with the collectives that its peers wait for.

    Args:
        selected: bool, or factors to multiply the gradient with; of the shape of ``values``.
        values: log-probs, entropies or a critic's values (B, T).
    """
    if values is None or not values.requires_grad:
        return values
    passed = torch.where(selected != 0, values, values.detach())
    if selected.is_floating_point():
        passed.register_hook(lambda grad: grad * selected.to(grad.dtype))
    return passed


class TrainingStep(Protocol):
    """One optimizer step that can be inspected and replayed: all that the core knows of a trainer's loss.

    The micro-batches of a rank are numbered from 0 in training's order.
    """

    num_micro_batches: int
    compute_dtype: torch.dtype
    """The dtype of the forward; weights and gradients may be finer."""
    loss_scale: float
    """The loss is multiplied by this (fp16), and so is the gradient that its backward adds; otherwise 1."""
    temperature: float
    """The logits were divided by this."""
    on_policy: bool
    """Whether the loss used the current log-probs, detached, as the old ones."""
    reduces_once: bool
    """Whether training reduces the gradient over ranks only after the last micro-batch."""

    def rows(self, micro_batch: int) -> list[int]:
        """The rows' numbers in the driver's batch; empty if the driver did not say."""

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        """bool (B, T): the response tokens of this rank's micro-batch."""

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        """float (B, T): how much each token's loss weighs in the whole step's loss, 1/N for a mean over N tokens."""

    def recorded(self, micro_batch: int) -> Recorded:
        """What the training pass left."""

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """The old log-probs (B, T) that the loss used, the importance ratio's denominator."""

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """c_t and e_t (B, T) of this rank's tokens: derivatives of the step's loss over all ranks, unscaled."""

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """d (this rank's KL term) / d log_prob (B, T); None without such a term. Runs no forward."""

    def has_finite_loss(self, micro_batch: int) -> bool:
        """Whether this rank's unscaled loss and its derivatives by the log-probs are finite. Runs no forward."""

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_prob and entropy (B, T) at the present weights, no graph, with recorded random numbers.

        In half precision the output head is applied in float32: log-probs rounded to bfloat16 would hide small moves.
        """

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward of a pass: reduces over ranks when training would.

        If training reduces once, after the last micro-batch, so must a replay: otherwise its sums round differently.
        """

    def forward_bytes(self) -> int:
        """Peak of :meth:`forward` beside the weights, in bytes: mostly float32 logits."""

    def entropies(self, micro_batch: int) -> torch.Tensor:
        """Entropy in nats (B, T) at the present weights, also if the loss has no entropy term: one forward."""

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        """The scaled loss, whose backward adds the selected tokens' part of the training gradient to ``.grad``.

        ``selected`` is what :func:`let_through` takes, (B, T); None selects everything.
        """


class Scheduled(ABC):
    """The part of a :class:`TrainingStep` that replaces ``loss`` and ``in_pass`` in an engine that schedules the passes
    over micro-batches itself, such as a pipeline."""

    @abstractmethod
    def share(self) -> None:
        """Called first: give what was recorded to all processes of the rank. May communicate."""

    @abstractmethod
    def run_pass(self, selections: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """Fill ``.grad`` with the sum of these selections' gradients, see :meth:`Prober.compute`."""


class LossOfGiven(Protocol):
    """Parts of a :class:`TrainingStep` for trainers whose loss can be computed from given log-probs, without a forward.

    Nothing here communicates, so one rank may ask alone.
    """

    dp_size: int
    """Data-parallel ranks, over which FSDP or DDP averages the gradient."""

    @property
    def loss_scale(self) -> float:
        """See :class:`TrainingStep`."""

    def recorded(self, micro_batch: int) -> Recorded:
        """See :class:`TrainingStep`."""

    def has_kl_term(self) -> bool:
        """Whether the loss has a KL term."""

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        """This rank's unscaled loss with these log-probs (B, T) in place of a forward's."""

    def leaf(self, micro_batch: int) -> torch.Tensor:
        """The recorded log-probs (B, T) as a float32 leaf to differentiate by."""
        return self.recorded(micro_batch).log_prob.detach().float().clone().requires_grad_()

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`TrainingStep`. Hooks saw this rank's scaled loss; the step's gradient is the unscaled mean over
        the ranks, hence the factor. Zeros if no gradient reached the log-probs."""
        recorded, factor = self.recorded(micro_batch), 1.0 / (self.dp_size * self.loss_scale)
        found, entropy = recorded.log_prob_coefficient, recorded.entropy_coefficient
        log_prob = torch.zeros_like(recorded.log_prob) if found is None else found * factor
        return log_prob, None if entropy is None else entropy * factor

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """See :class:`TrainingStep`: the derivative of the loss with the term less that of the loss without."""
        if not self.has_kl_term():
            return None
        derivatives: list[torch.Tensor] = []
        for is_without in (False, True):
            log_prob = self.leaf(micro_batch)
            loss = self.loss_of_given(micro_batch, log_prob, is_without)
            derivatives += torch.autograd.grad(loss, log_prob)
        return derivatives[0] - derivatives[1]

    def has_finite_loss(self, micro_batch: int) -> bool:
        """See :class:`TrainingStep`."""
        log_prob = self.leaf(micro_batch)
        loss = self.loss_of_given(micro_batch, log_prob)
        (coefficients,) = torch.autograd.grad(loss, log_prob)
        return bool(torch.isfinite(loss) and torch.isfinite(coefficients).all())


def to_host(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies in the host's memory by a single read per device: copying one by one would wait for it each time."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    there = {index: tensor.detach().contiguous() for index, tensor in enumerate(tensors) if tensor is not None}
    for device in {tensor.device for tensor in there.values()}:
        given = {index: tensor for index, tensor in there.items() if tensor.device == device}
        order = sorted(given, key=lambda index: -given[index].element_size())  # largest first: all stay aligned
        read = torch.cat([given[index].view(-1).view(torch.uint8) for index in order]).cpu()
        parts = read.split([given[index].numel() * given[index].element_size() for index in order])
        for index, part in zip(order, parts, strict=True):
            found[index] = part.view(given[index].dtype).view(given[index].shape)
    return found


class HostStep:
    """A step as a search reads it: all that concerns single tokens is copied to the host once.

    Masks, weights, records and coefficients of all micro-batches are read together when the first is asked for, the
    outputs of a forward with that forward. Nothing else waits for the device. All other attributes are the step's own.

    Args:
        step: the trainer's.
        device: where its model is.
    """

    def __init__(self, step: TrainingStep, device: torch.device):
        self._step, self._device = step, device
        self._held: dict[str, list[Any]] = {}
        self.is_scheduled = isinstance(step, Scheduled)
        if isinstance(step, Scheduled):
            step.share()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self._of_all("token_mask")[micro_batch]

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        return self._of_all("token_weights")[micro_batch]

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        return self._of_all("old_log_prob")[micro_batch]

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        return self._of_all("kl_coefficients")[micro_batch]

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._of_all("coefficients")[micro_batch]

    def recorded(self, micro_batch: int) -> Recorded:
        return self._of_all("recorded")[micro_batch]

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_prob, entropy = to_host(self._step.forward(micro_batch))
        assert log_prob is not None
        return log_prob, entropy

    def entropies(self, micro_batch: int) -> torch.Tensor:
        return to_host([self._step.entropies(micro_batch)])[0]  # type: ignore[return-value]

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        return self._step.loss(micro_batch, self._there(selected))

    def run_pass(self, selections: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        step: Any = self._step
        step.run_pass([(micro_batch, self._there(selected)) for micro_batch, selected in selections])

    def _there(self, selected: torch.Tensor | None) -> torch.Tensor | None:
        return None if selected is None else selected.to(self._device)

    def _of_all(self, name: str) -> list[Any]:
        if name not in self._held:
            together = ("token_mask", "token_weights", "coefficients", "recorded")
            names = together if name in together else (name,)
            found = {of: [getattr(self._step, of)(i) for i in range(self._step.num_micro_batches)] for of in names}
            self._held |= _on_host(found)
        return self._held[name]


def _on_host(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The same with every tensor on the host; values are tensors, tuples of them, or records."""
    flat = [tensor for values in found.values() for value in values for tensor in _tensors_of(value)]
    read = iter(to_host(flat))

    def copied(value: Any) -> Any:
        if isinstance(value, Recorded):
            kept = copy.copy(value)
            for name in Recorded.TENSORS:
                setattr(kept, name, next(read))
            return kept
        return tuple(next(read) for _ in value) if isinstance(value, tuple) else next(read)

    return {name: [copied(value) for value in values] for name, values in found.items()}


def _tensors_of(value: Any) -> Sequence[torch.Tensor | None]:
    if isinstance(value, Recorded):
        return [getattr(value, name) for name in Recorded.TENSORS]
    return value if isinstance(value, tuple) else (value,)
