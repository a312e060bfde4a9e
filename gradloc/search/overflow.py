# SPDX-License-Identifier: Apache-2.0
"""Search a spike whose norm overflowed though every coefficient is finite, as with an advantage of 1e22.

All norms are divided by a power of two, the *unit*, which changes no digit (docs/method.md, section 6). Only the
certificate is measured in training's own unit, since a healthy gradient divided by 1e37 would underflow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.certificate import Removal
from ..core.selection import Token
from ..record import Certificate
from .task import SearchResult, Span, Task, tokens_of

_LARGE = 2.0**30
"""From here on a coefficient may overflow a norm by itself: squares do from 2^64, and no log-prob's gradient has a norm
of 2^34."""
# fields of Spike, Span, PathEntry, Certificate and ShareMap: norms, and squares or products of gradients
_NORMS = ("norm", "threshold", "norm_after", "error_bound", "replay_difference")
_SQUARES = ("squares", "square", "products", "errors")


@dataclass(frozen=True)
class RescaledTask(Task):
    """The spike in a unit in which its gradient is finite: norms here are training's divided by ``unit``."""

    original: Task | None = None
    known: tuple[Span, ...] = ()
    """Tokens whose own loss is not finite, which no unit mends; they are left out of the gradient."""

    def coefficients(self, without: Sequence[Span]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return super().coefficients([*self.known, *without])

    def certify(self, culprits: list[Token], goes_on: bool = False, **_: Any) -> Certificate:
        """Certify in training's unit; if the norm overflows there even without the culprits, in this one."""
        assert self.original is not None
        step, space, unit = self.prober.step, self.prober.space, self.unit
        culprits = [*tokens_of(self.known), *culprits]
        step.rescale(1.0)
        found = self.original.certify(culprits, goes_on)
        step.rescale(unit)
        if not culprits:
            return found
        if found.norm_after is not None and math.isfinite(found.norm_after):
            space.scale(1.0 / unit)
            self.prober.sizes = {index: size / unit for index, size in self.prober.sizes.items()}
            return _scale_norms(1.0 / unit, found)
        removal = Removal(self.prober, self.gradient, 1.0, math.inf, self.spike.threshold, culprits)
        found = removal.certify(goes_on=True)
        if found.norm_after is None or not math.isfinite(found.norm_after):
            return found
        reason = "without the culprits the norm still overflows"
        return replace(found, norm_before=math.inf, verdict="not_explained", reason=reason)


def rescale_task(task: Task, known: Sequence[Span] = ()) -> RescaledTask | None:
    """Return the spike in a unit in which its gradient is finite, if its coefficients alone made its norm overflow;
    else None.

    All ranks call this together. Takes one pass over the micro-batches, and only where a coefficient is that large.
    ``known`` spans are left out.
    """
    prober, step = task.prober, task.prober.step

    def local() -> list[float]:
        sizes = [0.0]
        for pair in task.coefficients(known):
            for values in pair:
                if values is not None:
                    sizes.append(float(values.abs().nan_to_num(nan=math.inf).max()))
        return [max(sizes)]

    (largest,) = prober.ranks.max(prober.ranks.run_local_synced(local))
    least = _LARGE
    if step.dtype == torch.float16:  # whose range ends at 65,504, and holds the scaled gradient
        least, largest = 1.0, largest * step.loss_scale
    if not least <= largest < math.inf or not task.can_afford(backwards=step.num_micro_batches):
        return None
    unit = 2.0 ** math.frexp(largest)[1]
    step.rescale(unit)
    prober.compute_without(tokens_of(known))
    norm = prober.norm()
    if not math.isfinite(norm):  # the overflow is the backward's own, in any unit
        step.rescale(1.0)
        return None
    sizes = [prober.sizes.get(index, math.inf) for index in range(step.num_micro_batches)]
    return RescaledTask(
        prober=prober,
        gradient=prober.space.keep(),
        scale=1.0,
        spike=replace(_scale_norms(1.0 / unit, task.spike), grad_norm=norm),
        tau=task.tau / unit,
        max_culprits=task.max_culprits - len(known),
        limit=task.limit,
        increments=sizes if all(map(math.isfinite, sizes)) else None,
        usual_coefficient=task.usual_coefficient,
        unit=unit,
        square=norm**2,
        original=task,
        known=tuple(known),
    )


def to_training_unit(task: RescaledTask, result: SearchResult) -> SearchResult:
    """Convert the result in place to training's unit, and return it."""
    assert task.original is not None
    unit, found = task.unit, result.certificate
    task.prober.step.rescale(1.0)
    result.culprits = [*task.known, *(_scale_norms(unit, culprit) for culprit in result.culprits)]
    result.path = [_scale_norms(unit, entry) for entry in result.path]
    result.more_norm = None if result.more_norm is None else result.more_norm * unit
    result.shares = None if result.shares is None else _scale_norms(unit, result.shares)
    if found is not None and math.isfinite(found.norm_after or 0.0):
        result.certificate = replace(_scale_norms(unit, found), threshold=task.original.spike.threshold)
    return result


def _scale_norms(unit: float, found: Any) -> Any:
    """Multiply the norms of a dataclass by ``unit``, and its squares and products of gradients by ``unit`` squared."""

    def scaled(value: Any, factor: float) -> Any:
        if isinstance(value, list):
            return [each * factor for each in value]
        return None if value is None else value * factor

    factors = dict.fromkeys(_NORMS, unit) | dict.fromkeys(_SQUARES, unit**2)
    names = [field.name for field in fields(found) if field.name in factors]
    return replace(found, **{name: scaled(getattr(found, name), factors[name]) for name in names})
