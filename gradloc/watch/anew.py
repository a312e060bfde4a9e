# SPDX-License-Identifier: Apache-2.0
"""A step whose loss follows the weights: what the taps saw, with dL/dz made anew from the logits of each run.

The search holds dL/dh as training had it, which is right at the weights of training alone. At other weights a token's
log-prob has another derivative: what is kept of it here is d loss / d log_prob, which the weights do not enter.

Shapes: N positions, V outputs of a head, K parts of a loss (:mod:`.head`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.step import Numerics, Recorded
from .head import SMALL, chunks, logit_gradient
from .step import LoopStep
from .taps import Forwarded, Graph, ModelTap, Zero

_SATURATED = 0.01  # of 1 - p: below it a coefficient is mostly rounding, and the others' median takes its place
_UNLIKE = 0.3  # of dL/dz: where more is not of one log-prob, dL/dz itself is kept


@dataclass
class TapRecorded(Recorded):
    """What a search knows of a micro-batch; its gradient begins behind the model's outputs."""

    backward: Any = None
    """Called with a selection, the outputs of a forward with a graph, and a unit."""

    def pull(self, selected: torch.Tensor | None) -> Any:
        return partial(self.backward, selected)


class HeadPull(NamedTuple):
    """What a loss asked of one call of a head."""

    labels: torch.Tensor | None
    """(N,); None where dL/dz is kept as it was."""
    parts: torch.Tensor | None
    """(N, K): dL / d potential."""
    pull: torch.Tensor | None = None
    """dL/dz as training had it; None with neither, where only dL/dh is known."""

    @property
    def is_unknown(self) -> bool:
        return self.labels is None and self.pull is None


@dataclass
class AnewMicroBatch:
    """One forward, and what its loss asked of each head's call."""

    forwarded: Forwarded
    asked: Sequence[HeadPull]


class AnewStep(LoopStep):
    """Some forwards of a step: see :class:`~..core.step.TrainingStep`. Only whole micro-batches can be run.

    Args:
        tap: on the model.
        num_ranks: processes that the gradient is averaged over.
        made: the micro-batches.
        factor: what the gradient is multiplied by behind the backward.
    """

    def __init__(self, tap: ModelTap, num_ranks: int, made: Sequence[AnewMicroBatch], factor: float = 1.0):
        super().__init__(tap.outer, num_ranks, lambda: 1.0 / factor)
        self.tap, self._made, self.around_pass = tap, made, tap.around_pass

    @property
    def num_micro_batches(self) -> int:
        return len(self._made)

    @property
    def numerics(self) -> Numerics:
        return Numerics(self._made[0].forwarded.dtype, self._scale(), reduces_once=self.reduces_once)

    @property
    def reduces_once(self) -> bool:
        return any(each.forwarded.is_deferred for each in self._made[:-1])

    @property
    def is_stale(self) -> bool:
        """Whether an input was written to since."""
        return any(each.forwarded.is_changed for each in self._made)

    def recorded(self, micro_batch: int) -> Recorded:
        made = self._made[micro_batch]
        return TapRecorded(made.forwarded.rng, backward=partial(self._backward, made))

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Any:
        return self.tap.graph(self._made[micro_batch].forwarded, is_cut=False)

    @staticmethod
    def _backward(made: AnewMicroBatch, selected: None, graph: Graph, unit: float = 1.0) -> None:
        """Run backward from the heads' outputs, or from h where nothing else is known."""
        roots, grads = [], []
        for output, asked in zip(graph.heads, made.asked, strict=True):
            if output.requires_grad:  # DDP waits for each parameter, so a head gets zeros where nothing is known
                roots.append(output)
                grads.append(output.new_zeros(()).expand_as(output) if asked.is_unknown else _pull(output, asked))
        pull = made.forwarded.pull
        if all(asked.is_unknown for asked in made.asked) and graph.hidden is not None and pull is not None:
            roots.append(graph.hidden)
            grads.append(pull.to(graph.hidden.device))
        if graph.beside is not None and made.forwarded.beside is not None and graph.beside.requires_grad:
            roots.append(graph.beside)
            grads.append(made.forwarded.beside.to(graph.beside.dtype))
        if graph.anchors:
            roots.append(Zero.apply(*graph.anchors))
            grads.append(torch.ones_like(roots[-1]))
        torch.autograd.backward(roots, grads)


_UNKNOWN = HeadPull(None, None)


def present(step: Any) -> AnewStep:
    """Return a :class:`.tap_step.TapStep` that is settled, with the loss of its own weights."""
    made = []
    for each in step.micro_batches:
        forwarded, asked = each.forwarded, []
        for pull, (module, place) in zip(forwarded.head_pulls, forwarded.head_calls, strict=True):
            if (
                step.form == "log_probs"
                and each.labels is not None
                and each.found is not None
                and len(module.weight) > SMALL
            ):
                where = place.positions(each.labels.device).reshape(-1)
                asked.append(HeadPull(each.labels.reshape(-1)[where], each.found.parts[where, :4]))
            else:
                asked.append(_UNKNOWN if pull is None else HeadPull(None, None, pull))
        made.append(AnewMicroBatch(forwarded, asked))
    return AnewStep(step.tap, step.num_ranks, made, step.backward_factor)


@torch.no_grad()
def kept(step: Any) -> AnewStep:
    """Return the first micro-batch of a healthy :class:`.tap_step.TapStep`, without the logits of its forward."""
    original = step.micro_batches[0].forwarded
    asked = [_recovered(pull, output) for pull, output in zip(original.head_pulls, original.head_outputs, strict=True)]
    forwarded = copy.copy(original)
    forwarded.head_outputs, forwarded.head_pulls = [None] * len(asked), [None] * len(asked)
    if not all(each.is_unknown for each in asked):
        forwarded.pull = None
    return AnewStep(step.tap, step.num_ranks, [AnewMicroBatch(forwarded, asked)])


def _recovered(pull: torch.Tensor | None, output: torch.Tensor | None) -> HeadPull:
    """Return the loss's coefficients from dL/dz and z of one call.

    dL/dz = c (onehot - p) has its largest entry at the label, where it is c (1 - p).
    """
    if pull is None:
        return _UNKNOWN
    if output is None or output.shape != pull.shape or pull.shape[-1] <= SMALL:
        return HeadPull(None, None, pull)
    rows, pulls = output.reshape(-1, output.shape[-1]), pull.reshape(-1, pull.shape[-1])
    labels, coefficients, off = [], [], pulls.new_zeros((), dtype=torch.float32)
    for part in chunks(len(rows), rows.shape[-1]):
        logits, grads = rows[part].float(), pulls[part].float()
        label = grads.abs().argmax(-1)
        apart = -torch.expm1(logits.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1))
        value = grads.gather(-1, label.unsqueeze(-1)).squeeze(-1)
        c = torch.where(apart > _SATURATED, value / apart.clamp(min=_SATURATED), torch.nan).where(value != 0, 0.0)
        c = c.where(~c.isnan(), c.nanmedian().nan_to_num() if bool(c.isfinite().any()) else 0.0)
        parts = torch.nn.functional.pad(c.unsqueeze(-1), (0, 3))
        off = off + (logit_gradient(logits, label, parts) - grads).square().sum()
        labels.append(label)
        coefficients.append(parts)
    if not float(off) <= (_UNLIKE * float(torch.linalg.vector_norm(pulls.float()))) ** 2:
        return HeadPull(None, None, pull)
    return HeadPull(torch.cat(labels), torch.cat(coefficients))


def _pull(output: torch.Tensor, asked: HeadPull) -> torch.Tensor:
    """Return dL/dz at these logits."""
    if asked.labels is None or asked.parts is None:
        assert asked.pull is not None
        return asked.pull.to(output.dtype)
    rows = output.detach().reshape(-1, output.shape[-1])
    out = torch.empty_like(rows)
    for part in chunks(len(rows), rows.shape[-1]):
        out[part] = logit_gradient(rows[part], asked.labels[part], asked.parts[part]).to(out.dtype)
    return out.view_as(output)
