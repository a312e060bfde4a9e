# SPDX-License-Identifier: Apache-2.0
"""A step whose loss follows the weights: dL/dz is computed again from the logits of each run.

A search holds dL/dh, which is right at training's weights alone: at other weights a log-prob has another derivative.
Here d loss / d log_prob is held, which does not depend on the weights.

Shapes: N positions, V outputs of a head, K parts of a loss (:mod:`.head`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.step import Recorded
from .forwarded import Graph, HeadCall, RecordedForward
from .head import SMALL, chunks, logit_gradient, logit_gradients
from .step import LoopStep

_SATURATED = 0.01  # of 1 - p: below it a coefficient is mostly rounding, and the others' median takes its place
_UNLIKE = 0.3  # of dL/dz: where more is not of one log-prob, dL/dz itself is keep_first


@dataclass
class TapRecorded(Recorded):
    """A record whose backward begins at the outputs of :class:`.forwarded.Graph`."""

    backward: Any = None
    """Called with a selection, the outputs of a forward with a graph, and a unit."""
    selected: torch.Tensor | None = None
    """What the next forward with a graph is for: the selection of the last :meth:`pull`."""

    def pull(self, selected: torch.Tensor | None) -> Any:
        self.selected = selected
        return partial(self.backward, selected)


class HeadGradient(NamedTuple):
    """Derivatives of a loss by the output of one call of a head."""

    labels: torch.Tensor | None
    """(N,); None where dL/dz itself is held."""
    parts: torch.Tensor | None
    """(N, K): dL / d potential."""
    logit_grad: torch.Tensor | None = None
    """dL/dz as training had it; None with neither, where only dL/dh is known."""

    @property
    def is_unknown(self) -> bool:
        return self.labels is None and self.logit_grad is None


@dataclass
class AnewMicroBatch:
    """One forward, and the loss's derivatives by each call of a head."""

    forwarded: RecordedForward
    asked: Sequence[HeadGradient]
    recorded: TapRecorded = field(init=False)

    def __post_init__(self) -> None:
        self.recorded = TapRecorded(self.forwarded.rng, backward=self._backward)

    def _backward(self, selected: None, graph: Graph, unit: float = 1.0) -> None:
        """Run backward from the heads' outputs, or from h where nothing else is known."""
        roots, grads, hidden_grad = [], [], self.forwarded.hidden_grad
        for output, asked in zip(graph.heads, self.asked, strict=True):
            if output.requires_grad:  # DDP waits for each parameter, so a head gets zeros where nothing is known
                roots.append(output)
                grads.append(output.new_zeros(()).expand_as(output) if asked.is_unknown else _logit_grad(output, asked))
        if all(asked.is_unknown for asked in self.asked) and graph.hidden is not None and hidden_grad is not None:
            roots.append(graph.hidden)
            grads.append(hidden_grad.to(graph.hidden.device))
        graph.backward(roots, grads, self.forwarded.auxiliary_coefficient)


class AnewStep(LoopStep):
    """Some forwards of a step, to be run again as whole micro-batches.

    Args:
        step: that they are of.
        batches: the micro-batches.
        backward_factor: see :class:`~..core.step.TrainingStep`.
    """

    def __init__(self, step: LoopStep, batches: Sequence[AnewMicroBatch], backward_factor: float = 1.0):
        super().__init__(step.tap, step.num_ranks, backward_factor)
        self.micro_batches = [*batches]

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Any:
        batch = self.micro_batches[micro_batch]
        return self.tap.graph(batch.forwarded, is_cut=all(asked.is_unknown for asked in batch.asked))


_UNKNOWN = HeadGradient(None, None)


def follow_weights(step: Any) -> AnewStep:
    """Return a settled :class:`.tap_step.TapStep` as one whose loss follows the weights."""
    batches = []
    for each in step.micro_batches:
        asked = []
        for call in each.forwarded.head_calls:
            is_known = each.labels is not None and each.fit is not None and len(call.head.weight) > SMALL
            if step.form == "log_probs" and is_known:
                where = call.place.positions(each.labels.device).reshape(-1)
                asked.append(HeadGradient(each.labels.reshape(-1)[where], each.fit.parts[where, :4]))
            else:
                asked.append(_UNKNOWN if call.logit_grad is None else HeadGradient(None, None, call.logit_grad))
        batches.append(AnewMicroBatch(each.forwarded, asked))
    return AnewStep(step, batches, step.backward_factor)


@torch.no_grad()
def keep_first(step: Any) -> AnewStep:
    """Return the first micro-batch of a healthy :class:`.tap_step.TapStep`, without the logits of its forward."""
    original = step.micro_batches[0].forwarded
    asked = [_recover(call.logit_grad, call.output) for call in original.head_calls]
    forwarded = copy.copy(original)
    forwarded.head_calls = [HeadCall(call.head, call.place) for call in original.head_calls]
    if not all(each.is_unknown for each in asked):
        forwarded.hidden_grad = None
    return AnewStep(step, [AnewMicroBatch(forwarded, asked)])


def _recover(logit_grad: torch.Tensor | None, output: torch.Tensor | None) -> HeadGradient:
    """Recover the loss's coefficients from dL/dz and z of one call.

    dL/dz = c (onehot - p) has its largest entry at the label, where it is c (1 - p).
    """
    if logit_grad is None:
        return _UNKNOWN
    if output is None or output.shape != logit_grad.shape or logit_grad.shape[-1] <= SMALL:
        return HeadGradient(None, None, logit_grad)
    rows, whole = output.reshape(-1, output.shape[-1]), logit_grad.reshape(-1, logit_grad.shape[-1])
    labels, coefficients, off = [], [], whole.new_zeros((), dtype=torch.float32)
    for part in chunks(len(rows), rows.shape[-1]):
        logits, grads = rows[part].float(), whole[part].float()
        label = grads.abs().argmax(-1)
        apart = -torch.expm1(logits.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1))
        value = grads.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        c = torch.where(apart > _SATURATED, value / apart.clamp(min=_SATURATED), torch.nan).where(value != 0, 0.0)
        c = c.where(~c.isnan(), c.nanmedian().nan_to_num() if bool(c.isfinite().any()) else 0.0)
        parts = torch.nn.functional.pad(c.unsqueeze(-1), (0, 3))
        off = off + (logit_gradient(logits, label, parts) - grads).square().sum()
        labels.append(label)
        coefficients.append(parts)
    if not float(off) <= (_UNLIKE * float(torch.linalg.vector_norm(whole.float()))) ** 2:
        return HeadGradient(None, None, logit_grad)
    return HeadGradient(torch.cat(labels), torch.cat(coefficients))


def _logit_grad(output: torch.Tensor, asked: HeadGradient) -> torch.Tensor:
    """Return dL/dz at these logits."""
    if asked.labels is None or asked.parts is None:
        assert asked.logit_grad is not None
        return asked.logit_grad.to(output.dtype)
    return logit_gradients(output.detach(), asked.labels, asked.parts)
