# SPDX-License-Identifier: Apache-2.0
"""Compare the replayed gradient with training's at a spike, before anything is certified or masked.

Between the backward and the optimizer a loop may scale the gradient, clip it, or change it in any other way. Where the
replayed gradient, times one factor and the clips that were seen, is not the optimizer's, something else changed it. A
change too small to be a spike by itself did not make one: the replayed gradient is searched, and the change is added to
the certificate's error.
"""

import math
from collections.abc import Sequence

import torch

from ..core.gradients import Gradient, GradientSpace, in_batches, squared_norms
from ..core.sharding import local_shard
from ..explain.text import plural
from ..record import Fault
from .clips import Clip, ClipTap
from .tap_step import TapStep

SAME = {torch.float32: 3e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
"""Largest difference of two runs of a step over the norm, by the precision of the forward."""
_ROUNDING = 1e-3  # relative: a factor that is measured is off by less
_MAX_NAMES = 3  # parameters named in the sentence
_MAX_FAULTY = 8  # parameters of a fault
_REWRITTEN = "the loop's own code changed the gradient by another factor in each parameter, which cannot be done again"
_NOTABLE = 0.01  # of the squared difference: parameters with less are not named


def hold_against(
    step: TapStep, space: GradientSpace, before: Gradient, tap: ClipTap, norm: float, threshold: float
) -> None:
    """Compare the gradient in ``.grad``, run again and not scaled, with the one that the optimizer was to get.

    Afterwards ``.grad`` has the unit in which the gradient was clipped. Sets ``step.backward_factor``, the factor of
    that, and, where the gradients differ, ``step.objection`` or, by a change under the threshold, ``step.obstacle``.
    All ranks call this together.

    Args:
        step: settled.
        space: the trained parameters.
        before: the gradient that the optimizer was to get.
        tap: on its clips.
        norm: of the gradient before it.
        threshold: norm from which on a change is a spike by itself.
    """
    clips = tap.calls
    factors = _clip_factors(space, clips, tap.own_factor(norm))
    again, dots, given, _ = space.reduce_all(
        lambda: [space.own_squares(), space.own_dots(space.current(), before), space.own_squares(before)]
    )
    if tap.replaced is not None:  # only its norms are known of the gradient before the loop changed it
        given, dots, factors = tap.replaced, (tap.replaced * again).sqrt(), torch.ones_like(factors)
    outside = _outside(step, space, again, given)
    step.unsearched_norm = math.sqrt(float((given[outside] / factors[outside] ** 2).sum()))
    again[outside] = dots[outside] = given[outside] = 0.0
    is_by_value = any(call.is_by_value for call in clips)
    ratios = (dots / again / factors).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    same = SAME.get(step.dtype, SAME[torch.float32])
    is_multiple = dots**2 >= (1 - same) * again * given
    step.backward_factor = _exact(_weighted_median(ratios, again) or 1.0)
    if tap.replaced is not None:
        off = (given.sqrt() - step.backward_factor * again.sqrt()) ** 2
        step.obstacle = _REWRITTEN
    elif is_by_value:
        step.backward_factor = _exact(_factor_of_small(space, before, clips, factors))
        off = _after_clips(space, before, tap, step.backward_factor)
    else:
        off = _differences(space, before, step.backward_factor * factors)
    off[outside] = 0.0
    total = float(given.sum())
    apart = math.sqrt(float(off.sum()) / total) if total > 0 else 0.0
    step.apart = math.sqrt(float((off / factors**2).sum()))
    if not apart <= same:
        is_spike = not step.apart <= threshold
        may_be_written = is_multiple | (tap.is_written is not False)
        _object(step, space, off, ratios / step.backward_factor, outside, apart, is_spike, may_be_written)
    if tap.replaced is not None:
        scale = tap.usual_ratio or 1.0
        step.backward_factor, step.apart = step.backward_factor * scale, step.apart * scale
        step.unsearched_norm *= scale
    space.scale(step.backward_factor)


def versions(params: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return numbers that differ once a parameter was written to, or has other memory."""
    return [(param._version, param.data_ptr()) for param in params]


def _clip_factors(space: GradientSpace, clips: Sequence[Clip], own: float | None) -> torch.Tensor:
    """Return the clips' factor on each parameter's gradient, float64 (num_params,)."""
    found = torch.full((len(space.params),), 1.0 if own is None else own, dtype=torch.float64)
    place = {id(param): index for index, param in enumerate(space.params)}
    for call in clips:
        if not call.is_by_value:
            found[[place[id(param)] for param in call.params if id(param) in place]] *= call.factor()
    return found


@torch.no_grad()
def _differences(space: GradientSpace, before: Gradient, factors: torch.Tensor) -> torch.Tensor:
    """Return each parameter's squared difference of ``.grad`` times its factor and ``before``, float64 (num_params,).

    The difference itself is summed: from two squares and a product, which cancel, it would be off by as much as it may
    be.
    """

    def local() -> torch.Tensor:
        pairs: tuple[list[torch.Tensor], ...] = [], []
        for grad, given in zip(space.counted(space.current()), space.counted(before), strict=True):
            known = next((each for each in (grad, given) if each is not None), torch.zeros(0))
            for kept, each in zip(pairs, (grad, given), strict=True):
                kept.append(local_shard(torch.zeros_like(known) if each is None else each).to(known.device))
        out = torch.zeros(len(space.params), dtype=torch.float64)
        for where, again, own in in_batches(*pairs):
            scaled = torch._foreach_mul([each.double() for each in again], factors[where].tolist())
            off = torch._foreach_sub([each.double() for each in own], scaled)
            out.index_add_(0, torch.tensor(where), squared_norms(off, are_weights=True).cpu())
        return out

    return space.reduce(local)


def _outside(step: TapStep, space: GradientSpace, again: torch.Tensor, given: torch.Tensor) -> list[int]:
    """Return the parameters whose gradient is not searched: the head's, where dL/dz is not known, and those that only a
    part of the loss uses that passes by the last hidden state, such as a value head after dropout."""
    heads = step.tap.head_names(space)
    is_head = [step.form == "hidden" and name in heads for name in space.names]
    found = [index for index, head in enumerate(is_head) if head or (again[index] == 0 and given[index] > 0)]
    step.unsearched = tuple(space.names[index] for index in found)
    return found


def _exact(factor: float) -> float:
    """Round a measured factor to the power of two that it is within rounding, as a loss scale is; else return it."""
    power = 2.0 ** round(math.log2(factor)) if factor > 0 else factor
    return power if abs(factor - power) <= _ROUNDING * power else factor


def _weighted_median(values: torch.Tensor, weights: torch.Tensor) -> float:
    """Return the weighted median; 0 without any weight."""
    if not float(weights.sum()) > 0:
        return 0.0
    order = values.argsort()
    middle = int((weights[order].cumsum(0) >= weights.sum() / 2).nonzero()[0])
    return float(values[order][middle])


@torch.no_grad()
def _factor_of_small(space: GradientSpace, before: Gradient, clips: Sequence[Clip], factors: torch.Tensor) -> float:
    """Return the factor between backward and clips, from the elements that no clip by value changed.

    Args:
        space: the trained parameters; ``.grad`` has the gradient run again.
        before: the gradient after all clips.
        clips: in the order of their calls.
        factors: of the clips by norm on each parameter's gradient, float64 (num_params,).
    """
    limit, sums = math.inf, torch.zeros(2, dtype=torch.float64, device=space.params[0].device)
    for call in clips:  # a clip by norm scales what an earlier one by value left
        limit = min(limit, call.limit) if call.is_by_value else limit * call.factor()
    for grad, given, factor in zip(space.current(), before, factors.tolist(), strict=True):
        if grad is not None and given is not None:
            grad, given = local_shard(grad), local_shard(given).to(grad.device)
            kept = given.abs() < limit * (1 - _ROUNDING)
            both = [torch.where(kept, each.double(), 0.0).abs().sum() for each in (given, grad)]
            sums += torch.stack([both[0] / factor, both[1]])
    sums = space.reduce(lambda: sums)
    return float(sums[0] / sums[1]) if float(sums[1]) > 0 else 1.0


@torch.no_grad()
def _after_clips(space: GradientSpace, before: Gradient, tap: ClipTap, factor: float) -> torch.Tensor:
    """Return each parameter's squared difference after the same clips; ``.grad`` is restored."""
    kept = space.take()
    space.put([None if grad is None else grad * factor for grad in kept])
    try:
        tap.again(space)
        space.add(before, alpha=-1.0)
        return space.squares()
    finally:
        space.put(kept)


def _object(
    step: TapStep,
    space: GradientSpace,
    off: torch.Tensor,
    ratios: torch.Tensor,
    outside: list[int],
    apart: float,
    is_spike: bool,
    may_be_written: torch.Tensor,
) -> None:
    """Set the step's objection and its fault, or its obstacle, where the gradients differ.

    The gradient was changed after the backward where that of a few parameters differs, and each has one that was run
    again: a part of the loss that passes by the last hidden state has parameters of its own. Where torch counted no
    write to it, and it is no multiple of the one run again, the link is undecided: it may be a balancing loss that the
    forward keeps in a global list. Torch does not count writes to ``.grad.data``.
    """
    order = [int(index) for index in off.argsort(descending=True) if off[index] >= _NOTABLE * off.sum()]
    names = tuple(space.names[index] for index in order[:_MAX_FAULTY])
    shown = ", ".join(f"{space.names[index]} ({float(ratios[index]):.3g} times)" for index in order[:_MAX_NAMES])
    shown += f" and {len(order) - _MAX_NAMES} more" if len(order) > _MAX_NAMES else ""
    what = (
        f"run again from its last hidden state, the gradient differs from the optimizer's by {100 * apart:.3g} % of "
        f"its norm, in {plural(len(order), 'parameter')}: {shown}"
    )
    if not is_spike:
        step.obstacle = what
        return
    heads = step.tap.head_names(space)
    passed_by = next((space.names[index] for index in outside if space.names[index] not in heads), "")
    at = "after_backward"
    why = "the loop, a hook or a race changed it between backward and step, or a part of the loss passes by"
    if step.ranks.max([float(any(each.forwarded.is_passed_by for each in step.micro_batches))])[0]:
        at = "undecided"
        why = "the loss also uses another output of the model: name a state that both come from, as hidden=..."
    elif step.ranks.max([float(step.weights_at not in (None, versions(space.params)))])[0]:
        at = "undecided"
        why = "the loop moved weights between backward and step, as sharpness-aware training does"
    elif len(order) > len(space.params) / 2:
        at = "undecided"
        why = "its forward gives something else when run again, or a part of the loss passes through no hidden state"
    elif passed_by:
        at = "undecided"
        why = f"the loss also uses {passed_by}, which no head of that state has: name another state, as hidden=..."
    elif not step.ranks.max([float(may_be_written[order].all())])[0]:
        at = "undecided"
        why = (
            "nothing was seen to write to it after the backward, so a part of the loss passes by, or a hook changed it"
        )
    step.objection = f"{what}; {why}"
    evidence: dict[str, float | None] = {"difference": apart, "factor": float(ratios[order[0]]) if order else None}
    cause = "gradient_changed" if at == "after_backward" else None
    step.fault = Fault(at, cause, names, None, evidence, step.objection)
