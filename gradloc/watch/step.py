# SPDX-License-Identifier: Apache-2.0
"""Steps that are run again from a model's inputs: their base, and one whose loss follows the weights.

A search holds dL/dh, which is right at training's weights alone: at other weights a log-prob has another derivative.
There dL/dz is computed again from the logits of each run, by d loss / d log_prob, which does not depend on the weights.

Shapes: N positions, V outputs of a head, K parts of a loss (:mod:`.head`).
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.sharding import reduction_deferred
from ..core.step import Recorded, TrainingStep
from .forwarded import Graph, HeadCall, RecordedForward
from .head import SMALL, chunks, logit_gradient, logit_gradients
from .taps import ModelTap

_SATURATED = 0.01  # of 1 - p: below it a coefficient is mostly rounding, and the others' median takes its place
_UNLIKE = 0.3  # of dL/dz: where more than this is not of one log-prob, dL/dz itself is kept


class LoopStep(TrainingStep):
    """Forwards of one optimizer step that the taps saw; its micro-batches each have ``forwarded``."""

    def __init__(self, tap: ModelTap, num_ranks: int, backward_factor: float = 1.0):
        super().__init__(tap.device, num_ranks, backward_factor)
        self.tap, self.module = tap, tap.outer

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        found = self.micro_batches[0].forwarded.dtype
        return torch.float32 if found == torch.float64 else found  # no search reckons with finer

    @property
    def reduces_once(self) -> bool:
        return any(each.forwarded.is_deferred for each in self.micro_batches[:-1])

    @property
    def is_stale(self) -> bool:
        """Whether an input was written to since."""
        return any(each.forwarded.is_changed for each in self.micro_batches)

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        if self.tap.around_pass is not None:
            return self.tap.around_pass(is_last)
        return reduction_deferred(self.module) if self.reduces_once and not is_last else nullcontext()


# ---- at other weights


@dataclass
class TapRecorded(Recorded):
    """A record whose backward begins at the outputs of :class:`.forwarded.Graph`."""

    backward: Any = None
    """(selection, outputs of a forward with a graph, unit) -> None: runs the backward."""
    selected: torch.Tensor | None = None
    """The selection of the last :meth:`pull`, which the next forward with a graph is for."""

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
    head_grads: Sequence[HeadGradient]
    recorded: TapRecorded = field(init=False)

    def __post_init__(self) -> None:
        self.recorded = TapRecorded(self.forwarded.rng, backward=self._backward)

    @property
    def is_hidden_alone(self) -> bool:
        """Whether nothing but dL/dh is known."""
        return all(head_grad.is_unknown for head_grad in self.head_grads)

    def _backward(self, selected: None, graph: Graph, unit: float = 1.0) -> None:
        """Run backward from the heads' outputs, or from h where nothing else is known."""
        roots, grads, hidden_grad = [], [], self.forwarded.hidden_grad
        for output, head_grad in zip(graph.heads, self.head_grads, strict=True):
            if output.requires_grad:
                roots.append(output)
                grads.append(_logit_grad(output, head_grad))
        if self.is_hidden_alone and graph.hidden is not None and hidden_grad is not None:
            roots.append(graph.hidden)
            grads.append(hidden_grad.to(graph.hidden.device))
        graph.backward(roots, grads, self.forwarded.auxiliary_coefficient)


class AnewStep(LoopStep):
    """Some forwards of a step, to be run again as whole micro-batches."""

    def __init__(self, step: LoopStep, batches: Sequence[AnewMicroBatch], backward_factor: float = 1.0):
        super().__init__(step.tap, step.num_ranks, backward_factor)
        self.micro_batches = [*batches]

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Any:
        batch = self.micro_batches[micro_batch]
        return self.tap.graph(batch.forwarded, is_cut=batch.is_hidden_alone)


def follow_weights(step: Any) -> AnewStep:
    """Return a settled :class:`.tap_step.TapStep` as one whose loss follows the weights."""
    batches = []
    for each in step.micro_batches:
        head_grads = []
        for call in each.forwarded.head_calls:
            is_known = each.labels is not None and each.fit is not None and len(call.head.weight) > SMALL
            if step.form == "log_probs" and is_known:
                where = call.place.positions(each.labels.device).reshape(-1)
                head_grads.append(HeadGradient(each.labels.reshape(-1)[where], each.fit.parts[where, :4]))
            else:
                head_grads.append(HeadGradient(None, None, call.logit_grad))
        batches.append(AnewMicroBatch(each.forwarded, head_grads))
    return AnewStep(step, batches, step.backward_factor)


@torch.no_grad()
def keep_first(step: Any) -> AnewStep:
    """Return the first micro-batch of a healthy :class:`.tap_step.TapStep`, without the logits of its forward."""
    original = step.micro_batches[0].forwarded
    head_grads = [_recover(call.logit_grad, call.output) for call in original.head_calls]
    forwarded = copy.copy(original)
    forwarded.head_calls = [HeadCall(call.head, call.place) for call in original.head_calls]
    batch = AnewMicroBatch(forwarded, head_grads)
    if not batch.is_hidden_alone:
        forwarded.hidden_grad = None
    return AnewStep(step, [batch])


def _recover(logit_grad: torch.Tensor | None, output: torch.Tensor | None) -> HeadGradient:
    """Recover the loss's coefficients from dL/dz and z of one call.

    dL/dz = c (onehot - p) has its largest entry at the label, where it is c (1 - p).
    """
    if logit_grad is None or output is None or output.shape != logit_grad.shape or logit_grad.shape[-1] <= SMALL:
        return HeadGradient(None, None, logit_grad)
    rows, whole = output.reshape(-1, output.shape[-1]), logit_grad.reshape(-1, logit_grad.shape[-1])
    labels, coefficients, off = [], [], whole.new_zeros((), dtype=torch.float32)
    for at in chunks(len(rows), rows.shape[-1]):
        logits, grads = rows[at].float(), whole[at].float()
        label = grads.abs().argmax(-1)
        one_minus_p = -torch.expm1(logits.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1))
        value = grads.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        c = torch.where(one_minus_p > _SATURATED, value / one_minus_p.clamp(min=_SATURATED), torch.nan)
        c = c.where(value != 0, 0.0)
        c = c.where(~c.isnan(), c.nanmedian().nan_to_num() if bool(c.isfinite().any()) else 0.0)
        parts = torch.nn.functional.pad(c.unsqueeze(-1), (0, 3))
        off = off + (logit_gradient(logits, label, parts) - grads).square().sum()
        labels.append(label)
        coefficients.append(parts)
    if not float(off) <= (_UNLIKE * float(torch.linalg.vector_norm(whole.float()))) ** 2:
        return HeadGradient(None, None, logit_grad)
    return HeadGradient(torch.cat(labels), torch.cat(coefficients))


def _logit_grad(output: torch.Tensor, head_grad: HeadGradient) -> torch.Tensor:
    """Return dL/dz at these logits; zeros where nothing is known, since DDP waits for each of a head's parameters."""
    if head_grad.labels is not None and head_grad.parts is not None:
        return logit_gradients(output.detach(), head_grad.labels, head_grad.parts)
    known = head_grad.logit_grad
    return output.new_zeros(()).expand_as(output) if known is None else known.to(output.dtype)
