# SPDX-License-Identifier: Apache-2.0
"""Keep what is run again at other weights: a micro-batch of an ordinary step, and a step with the trainer's loss."""

import copy
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.gradients import GradientSpace
from ..core.step import LossReplay, Outputs, Recorded, Scheduled, TrainingStep

_EVERY = 8  # optimizer steps between two references
_WINDOW = 32  # last norms, whose median an ordinary step's norm is compared with
_ORDINARY = 1.5  # times that median: a step of a larger norm gives no reference
_MEASURED = 8  # references whose norms after the backward and at the step are remembered


class Measured(NamedTuple):
    """The norms of a reference's step."""

    norm: float
    """Norm of the step's gradient, as the optimizer took it."""
    first: torch.Tensor
    """This process' part of the squared norm in ``.grad`` after the first backward."""
    last: torch.Tensor
    """The same after the last backward."""


class Reference(NamedTuple):
    """One micro-batch of an earlier step."""

    step: TrainingStep
    """A step of this micro-batch alone."""
    number: int
    """The trainer's number of the step."""
    norm: float
    """The norm of the step's gradient."""
    num_micro_batches: int
    """The number of the step's micro-batches."""
    measured: tuple[Measured, ...]
    """Norms of earlier references and of this one, which is last; empty if ranks had not summed the gradient yet."""

    @property
    def norms(self) -> list[float]:
        """The step's norm and those of :attr:`measured`, with zeros between them for the same length on every rank."""
        known = [each.norm for each in self.measured]
        return [self.norm, *[0.0] * (_MEASURED - len(known)), *known]

    def with_norms(self, norms: list[float]) -> "Reference":
        """Return this with another rank's :attr:`norms`."""
        known = norms[len(norms) - len(self.measured) :]
        measured = (each._replace(norm=norm) for each, norm in zip(self.measured, known, strict=True))
        return self._replace(norm=norms[0], measured=tuple(measured))


class ReferenceKeeper:
    """Keeps the first micro-batch of an ordinary step every few steps. It holds no gradient and no activation.

    :attr:`is_wanted` is set before a step's first forward; the step has to leave what it is run again from.
    """

    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.is_wanted = False
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._measured: deque[Measured] = deque(maxlen=_MEASURED)
        self._num_steps = 0
        self._squares: list[torch.Tensor] = []

    def squares(self, space: GradientSpace) -> list[torch.Tensor]:
        """Return this process' squares of :attr:`Reference.measured`, alternating first and last.

        They are padded in front with zeros to the same length on every rank.
        """
        measured = () if self.reference is None else self.reference.measured
        known = [square for each in measured for square in (each.first, each.last)]
        return [torch.zeros((), device=space.params[0].device)] * (2 * _MEASURED - len(known)) + known

    def begin(self, step: Any) -> None:
        """Begin a step: decide whether its first micro-batch is to be kept."""
        self.is_wanted = self._num_steps % _EVERY == 0 or self.reference is None
        if self.is_wanted and hasattr(step, "prepare_to_keep"):
            step.prepare_to_keep()
        self._num_steps += 1
        self._squares = []

    def after_backward(self, space: GradientSpace) -> None:
        """Note the norm of what ``.grad`` holds; nothing is read from the device."""
        if self.is_wanted and space.params:
            try:
                self._squares = [*self._squares[:1], space.local_squares().sum()]
            except (torch.OutOfMemoryError, MemoryError):  # training itself has room
                self.is_wanted = False

    def end(self, step: Any, norm: float, number: int, is_spike: bool) -> None:
        """Keep the first micro-batch if the step was ordinary."""
        is_ordinary = norm > 0 and (not self._norms or norm <= _ORDINARY * statistics.median(self._norms))
        if self.is_wanted and is_ordinary and not is_spike:
            self._keep(step, norm, number)
        if norm > 0 and not is_spike:
            self._norms.append(norm)
        self._squares = []

    def _keep(self, step: Any, norm: float, number: int) -> None:
        """Keep the step's first micro-batch, unless it cannot be run alone, as of a pipeline's step."""
        if isinstance(step, Scheduled) or not hasattr(step, "kept") or not step.num_micro_batches:
            return
        kept = step.kept()
        if kept is None:
            return
        measured: tuple[Measured, ...] = ()
        if self._squares and not step.reduces_once:
            self._measured.append(Measured(norm, self._squares[0], self._squares[-1]))
            measured = tuple(self._measured)
        self.reference = Reference(kept, number, norm, step.num_micro_batches, measured)


def with_live_loss(step: LossReplay) -> Any:
    """Return a copy of a step that, run at other weights, computes its loss anew from the log-probs it gets there."""
    found: Any = copy.copy(step)
    found.recorded = lambda micro_batch: _LossRecorded.from_step(step, micro_batch)
    return found


@dataclass
class _LossRecorded(Recorded):
    """A micro-batch whose backward begins at the trainer's loss, not at recorded coefficients."""

    step: Any = None
    micro_batch: int = 0

    @classmethod
    def from_step(cls, step: Any, micro_batch: int) -> "_LossRecorded":
        recorded = step.recorded(micro_batch)
        found = cls(recorded.rng, step=step, micro_batch=micro_batch)
        vars(found).update(vars(recorded))  # log_prob, which a forward sets, included
        return found

    def pull(self, selected: torch.Tensor | None) -> Any:
        """Return a function of the outputs that runs the backward, in place of coefficients for one."""
        return self._backward

    def _backward(self, outputs: Outputs, unit: float = 1.0) -> None:
        inputs = Outputs(outputs.log_prob, None if self.entropy is None else outputs.entropy)
        roots = [self.step.loss_under(self.micro_batch, inputs, {}, {}) * self.step.loss_factor]
        grads = [torch.ones_like(roots[0])]
        if outputs.auxiliary is not None and self.auxiliary_coefficient is not None:
            roots.append(outputs.auxiliary)
            grads.append(self.auxiliary_coefficient.to(outputs.auxiliary))
        torch.autograd.backward(roots, grads)
