# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as it may be looked into and replayed: what an adapter gives, and how a search reads it.

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
    """The random state of this process: the CPU's, and the accelerator's where there is one."""

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
    """What the training forward and backward of one micro-batch left behind on this rank."""

    rng: RngState
    """Before the forward."""
    log_prob: torch.Tensor = field(init=False)
    """(B, T), detached; there once the forward has run."""
    entropy: torch.Tensor | None = None
    """(B, T), detached; None when the loss did not ask for it."""
    log_prob_coefficient: torch.Tensor | None = None
    """d loss / d log_prob (B, T), as the backward delivered it."""
    entropy_coefficient: torch.Tensor | None = None
    """d loss / d entropy (B, T); None when entropy is not part of the loss."""
    is_value: bool = False
    """Whether it is a critic's: values then stand where log-probs stand, everywhere, and there is no entropy."""

    TENSORS = ("log_prob", "entropy", "log_prob_coefficient", "entropy_coefficient")


def record(recorded: Recorded, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
    """Keep the training forward's values and hook its coefficients; changes nothing and computes nothing."""
    recorded.log_prob = log_prob.detach()
    if log_prob.requires_grad:
        log_prob.register_hook(lambda grad: setattr(recorded, "log_prob_coefficient", grad.detach()))
    if entropy is not None:
        recorded.entropy = entropy.detach()
        if entropy.requires_grad:
            entropy.register_hook(lambda grad: setattr(recorded, "entropy_coefficient", grad.detach()))


def let_through(selected: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor | None:
    """Pass gradient for the selected positions only; the values stay the same, bit for bit.

    where() keeps a (zero) path even when nothing is selected, so that a rank with no token of the set still runs the
    backward, and the collectives in it, that its peers wait for.

    Args:
        selected: bool, or the factors that the gradient is multiplied with, of the shape of ``values``.
        values: log-probs, entropies or a critic's values.
    """
    if values is None or not values.requires_grad:
        return values
    passed = torch.where(selected != 0, values, values.detach())
    if selected.is_floating_point():
        passed.register_hook(lambda grad: grad * selected.to(grad.dtype))
    return passed


class TrainingStep(Protocol):
    """One optimizer step as it may be looked into and replayed: all that the core knows of the trainer's loss."""

    num_micro_batches: int
    compute_dtype: torch.dtype
    """What the forward computes in."""
    loss_scale: float
    """What the loss, and so every gradient that its backward adds, is multiplied with (fp16); else 1."""
    temperature: float
    """What the logits were divided by."""
    on_policy: bool
    """Whether the current log-probs stood in for the old ones."""
    reduces_once: bool
    """Whether training reduces the gradient over ranks after the last micro-batch alone."""

    def rows(self, micro_batch: int) -> list[int]:
        """Where the micro-batch's rows stand in the driver's batch; empty when the driver did not say."""

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        """bool (B, T): the response tokens of this rank's micro-batch."""

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        """float (B, T): the factor of each token's own loss in the whole step's loss, over all ranks."""

    def recorded(self, micro_batch: int) -> Recorded:
        """What the training pass left behind."""

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """The old log-probs (B, T) that the loss used."""

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """d step loss / d log_prob and d entropy (B, T) of this rank's tokens, in the scale of the step's gradient."""

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """The KL term's part of them, d (this rank's KL term) / d log_prob (B, T), no forward; None without one."""

    def has_finite_loss(self, micro_batch: int) -> bool:
        """Whether the loss and its derivative by every log-prob are finite before any scaling: no forward."""

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """log_prob and entropy (B, T) at the present weights, without a graph, read out as precisely as can be."""

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        """Around one forward and backward of a pass over micro-batches: how training reduces the gradient over ranks.

        Where it does so once, after the last micro-batch, a probe must, too: a sum has another rounding otherwise.
        """

    def forward_bytes(self) -> int:
        """What :meth:`forward` holds at its peak beside the weights, in bytes: mostly the logits in float32."""

    def entropies(self, micro_batch: int) -> torch.Tensor:
        """Entropy in nats (B, T) at the present weights, also where the loss has no entropy term: one forward."""

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        """The loss, scaled: its backward adds the selected tokens' part of the training gradient to ``.grad``.

        None selects everything; numbers in the place of bool (B, T) multiply the gradient of each token.
        """


class Scheduled(ABC):
    """A part of :class:`TrainingStep` where the engine runs a pass over micro-batches by a schedule of its own, such as
    a pipeline's, in place of ``loss`` and ``in_pass``."""

    @abstractmethod
    def share(self) -> None:
        """Before anything is asked: have what was recorded on all of a rank's processes. May communicate."""

    @abstractmethod
    def run_pass(self, selections: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """Fill ``.grad`` with the sum of these selections' gradients, see :meth:`Prober.compute`."""


class LossOfGiven(Protocol):
    """A part of :class:`TrainingStep` for any trainer whose loss can be computed of given log-probs, without a forward.

    Nothing here communicates: one rank may ask alone.
    """

    dp_size: int
    """Data-parallel ranks, over whose losses the gradient is averaged."""

    @property
    def loss_scale(self) -> float:
        """See :class:`TrainingStep`."""

    def recorded(self, micro_batch: int) -> Recorded:
        """See :class:`TrainingStep`."""

    def has_kl_term(self) -> bool:
        """Whether the loss has one."""

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        """This rank's loss, before any scaling, with these log-probs (B, T) in the place of a forward's."""

    def leaf(self, micro_batch: int) -> torch.Tensor:
        """The recorded log-probs (B, T) in float32, to be differentiated by."""
        return self.recorded(micro_batch).log_prob.detach().float().clone().requires_grad_()

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`TrainingStep`: a coefficient is of this rank's own (scaled) loss, the step's gradient is
        the mean over the ranks."""
        recorded, factor = self.recorded(micro_batch), 1.0 / (self.dp_size * self.loss_scale)
        found, entropy = recorded.log_prob_coefficient, recorded.entropy_coefficient
        log_prob = torch.zeros_like(recorded.log_prob) if found is None else found * factor
        return log_prob, None if entropy is None else entropy * factor

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """See :class:`TrainingStep`: of the loss with the term less that of the loss without."""
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
    """Copies in the host's memory, by a single read of the device: a copy of each by itself waits for it each time."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    there = {index: tensor.detach().contiguous() for index, tensor in enumerate(tensors) if tensor is not None}
    for device in {tensor.device for tensor in there.values()}:
        given = {index: tensor for index, tensor in there.items() if tensor.device == device}
        order = sorted(given, key=lambda index: -given[index].element_size())  # so that each begins where its type may
        read = torch.cat([given[index].view(-1).view(torch.uint8) for index in order]).cpu()
        parts = read.split([given[index].numel() * given[index].element_size() for index in order])
        for index, part in zip(order, parts, strict=True):
            found[index] = part.view(given[index].dtype).view(given[index].shape)
    return found


class HostStep:
    """A step as a search looks at it: everything about single tokens lies in the host's memory, read once.

    Masks, weights, records and coefficients of all micro-batches are read together when one is first asked for; what a
    forward gives, with the forward. Nothing after that waits for the device. The rest is the step's own.

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
    """The same with every tensor on the host: tensors, tuples of them, records."""
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
