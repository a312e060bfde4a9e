# SPDX-License-Identifier: Apache-2.0
"""Compare the replayed gradient with training's at a spike, before anything is certified or masked.

Between the backward and the optimizer a loop may scale the gradient, clip it, or change it in any other way. If the
replayed gradient, times one factor and clipped as was seen, is not what the optimizer got, something else changed it.
A change too small to be a spike by itself is not what made the spike: the replayed gradient is searched all the same,
and the change is added to the certificate's error.
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
"""Largest relative difference of two runs of the same step, by the forward's precision."""
_ROUNDING = 1e-3  # relative: a factor that is measured is off by less
_MAX_NAMES = 3  # parameters named in the objection
_MAX_FAULTY = 8  # parameters in the fault's record
_REWRITTEN = "the loop's own code changed the gradient by another factor in each parameter, which cannot be done again"
_NOTABLE = 0.01  # share of the squared difference below which a parameter is not named


def check_replay(
    step: TapStep, space: GradientSpace, original: Gradient, clip_tap: ClipTap, norm: float, threshold: float
) -> None:
    """Compare the replayed gradient in ``.grad`` with the one that the optimizer was to get, and note on ``step`` where
    they differ.

    Sets ``step.backward_factor``, the factor between the backward and the first clip, and scales ``.grad`` by it. Where
    the gradients differ by a spike of its own, sets ``step.objection``: the step is not searched. Where they differ by
    less, sets ``step.obstacle``: the step is searched, and not masked. All ranks call this together.

    Args:
        step: settled; its replayed gradient is in ``.grad``, not scaled.
        space: the trained parameters.
        original: the gradient that the optimizer was to get.
        clip_tap: the loop's clips in this step.
        norm: the gradient's norm before them.
        threshold: a change of at least this norm is a spike by itself.
    """
    clips = clip_tap.calls
    factors = _clip_factors(space, clips, clip_tap.own_factor(norm))
    squares, dots, original_squares, _ = space.reduce_all(
        lambda: [space.own_squares(), space.own_dots(space.current(), original), space.own_squares(original)]
    )
    if clip_tap.replaced is not None:  # of the gradient before the loop changed it only norms are known
        original_squares = clip_tap.replaced
        dots, factors = (original_squares * squares).sqrt(), torch.ones_like(factors)
    unsearched = _find_unsearched(step, space, squares, original_squares)
    step.unsearched_norm = math.sqrt(float((original_squares[unsearched] / factors[unsearched] ** 2).sum()))
    squares[unsearched] = dots[unsearched] = original_squares[unsearched] = 0.0
    is_by_value = any(call.is_by_value for call in clips)
    ratios = (dots / squares / factors).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    same = SAME.get(step.dtype, SAME[torch.float32])
    is_multiple = dots**2 >= (1 - same) * squares * original_squares
    step.backward_factor = _rounded_to_power(_weighted_median(ratios, squares) or 1.0)
    if clip_tap.replaced is not None:
        differences = (original_squares.sqrt() - step.backward_factor * squares.sqrt()) ** 2
        step.obstacle = _REWRITTEN
    elif is_by_value:
        step.backward_factor = _rounded_to_power(_factor_of_unclipped(space, original, clips, factors))
        differences = _differences_after_clips(space, original, clip_tap, step.backward_factor)
    else:
        differences = _differences(space, original, step.backward_factor * factors)
    differences[unsearched] = 0.0
    total = float(original_squares.sum())
    relative = math.sqrt(float(differences.sum()) / total) if total > 0 else 0.0
    step.apart = math.sqrt(float((differences / factors**2).sum()))
    if not relative <= same:
        notable = _NOTABLE * differences.sum()
        order = [int(index) for index in differences.argsort(descending=True) if differences[index] >= notable]
        what = _difference_text(space, order, ratios / step.backward_factor, relative)
        if step.apart <= threshold:
            step.obstacle = what
        else:
            may_be_written = is_multiple | (clip_tap.is_written is not False)
            at, why = _locate_change(step, space, order, unsearched, may_be_written)
            step.objection = f"{what}; {why}"
            factor = float(ratios[order[0]] / step.backward_factor) if order else None
            evidence: dict[str, float | None] = {"difference": relative, "factor": factor}
            names = tuple(space.names[index] for index in order[:_MAX_FAULTY])
            cause = "gradient_changed" if at == "after_backward" else None
            step.fault = Fault(at, cause, names, None, evidence, step.objection)
    if clip_tap.replaced is not None:
        scale = clip_tap.usual_ratio or 1.0
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
def _differences(space: GradientSpace, original: Gradient, factors: torch.Tensor) -> torch.Tensor:
    """Return each parameter's squared difference of ``.grad`` times its factor and ``original``, float64 (num_params,).

    The difference itself is summed. Computed from two squares and a product, which cancel, its error would be as large
    as the differences that are allowed.
    """

    def local() -> torch.Tensor:
        pairs: tuple[list[torch.Tensor], ...] = [], []
        for grad, given in zip(space.counted(space.current()), space.counted(original), strict=True):
            known = next((each for each in (grad, given) if each is not None), torch.zeros(0))
            for kept, each in zip(pairs, (grad, given), strict=True):
                kept.append(local_shard(torch.zeros_like(known) if each is None else each).to(known.device))
        out = torch.zeros(len(space.params), dtype=torch.float64)
        for where, replayed, own in in_batches(*pairs):
            scaled = torch._foreach_mul([each.double() for each in replayed], factors[where].tolist())
            difference = torch._foreach_sub([each.double() for each in own], scaled)
            out.index_add_(0, torch.tensor(where), squared_norms(difference, are_weights=True).cpu())
        return out

    return space.reduce(local)


def _find_unsearched(
    step: TapStep, space: GradientSpace, squares: torch.Tensor, original_squares: torch.Tensor
) -> list[int]:
    """Find the parameters whose gradient is not searched; returns their indices, and names them on the step.

    These are the head's, where dL/dz is not known, and parameters used only by a part of the loss that bypasses the
    last hidden state, such as a value head after dropout.
    """
    heads = step.tap.head_names(space)
    is_head = [step.form == "hidden" and name in heads for name in space.names]
    found = [
        index for index, head in enumerate(is_head) if head or (squares[index] == 0 and original_squares[index] > 0)
    ]
    step.unsearched = tuple(space.names[index] for index in found)
    return found


def _rounded_to_power(factor: float) -> float:
    """Round a measured factor to a power of two, as loss scales are, where that is within its error."""
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
def _factor_of_unclipped(
    space: GradientSpace, original: Gradient, clips: Sequence[Clip], factors: torch.Tensor
) -> float:
    """Measure the factor between the backward and the clips on the elements that no clip by value changed.

    ``.grad`` has the gradient run again, ``original`` the one after all clips; ``factors`` are those of the clips by
    norm on each parameter's gradient, float64 (num_params,).
    """
    limit, sums = math.inf, torch.zeros(2, dtype=torch.float64, device=space.params[0].device)
    for call in clips:  # a clip by norm scales what an earlier one by value left
        limit = min(limit, call.limit) if call.is_by_value else limit * call.factor()
    for grad, given, factor in zip(space.current(), original, factors.tolist(), strict=True):
        if grad is not None and given is not None:
            grad, given = local_shard(grad), local_shard(given).to(grad.device)
            kept = given.abs() < limit * (1 - _ROUNDING)
            both = [torch.where(kept, each.double(), 0.0).abs().sum() for each in (given, grad)]
            sums += torch.stack([both[0] / factor, both[1]])
    sums = space.reduce(lambda: sums)
    return float(sums[0] / sums[1]) if float(sums[1]) > 0 else 1.0


@torch.no_grad()
def _differences_after_clips(
    space: GradientSpace, original: Gradient, clip_tap: ClipTap, factor: float
) -> torch.Tensor:
    """Return each parameter's squared difference after the same clips; ``.grad`` is restored."""
    kept = space.take()
    space.put([None if grad is None else grad * factor for grad in kept])
    try:
        clip_tap.again(space)
        space.add(original, alpha=-1.0)
        return space.squares()
    finally:
        space.put(kept)


def _difference_text(space: GradientSpace, order: list[int], ratios: torch.Tensor, relative: float) -> str:
    shown = ", ".join(f"{space.names[index]} ({float(ratios[index]):.3g} times)" for index in order[:_MAX_NAMES])
    if len(order) > _MAX_NAMES:
        shown += f" and {len(order) - _MAX_NAMES} more"
    return (
        f"run again from its last hidden state, the gradient differs from the optimizer's by {100 * relative:.3g} % of "
        f"its norm, in {plural(len(order), 'parameter')}: {shown}"
    )


def _locate_change(
    step: TapStep, space: GradientSpace, order: list[int], unsearched: list[int], may_be_written: torch.Tensor
) -> tuple[str, str]:
    """Return where the gradient was changed, ``after_backward`` or ``undecided``, and the reason in words.

    It is after the backward if the gradients of a few parameters differ and each of them has a replayed one, since a
    part of the loss that bypasses the last hidden state has parameters of its own. It stays undecided if torch counted
    no write to a gradient that is no multiple of the replayed one: that may be a balancing loss which the forward keeps
    in a global list. Torch does not count writes to ``.grad.data``.
    """

    def is_on_any_rank(flag: bool) -> bool:
        return not step.ranks.all(not flag)

    heads = step.tap.head_names(space)
    bypassing = next((space.names[index] for index in unsearched if space.names[index] not in heads), "")
    if is_on_any_rank(any(each.forwarded.is_passed_by for each in step.micro_batches)):
        why = "the loss also uses another output of the model: name a state that both come from, as hidden=..."
    elif is_on_any_rank(step.weights_at not in (None, versions(space.params))):
        why = "the loop moved weights between backward and step, as sharpness-aware training does"
    elif len(order) > len(space.params) / 2:
        why = "its forward gives something else when run again, or a part of the loss passes through no hidden state"
    elif bypassing:
        why = f"the loss also uses {bypassing}, which no head of that state has: name another state, as hidden=..."
    elif not is_on_any_rank(bool(may_be_written[order].all())):
        why = (
            "nothing was seen to write to it after the backward, so a part of the loss passes by, or a hook changed it"
        )
    else:
        why = "the loop, a hook or a race changed it between backward and step, or a part of the loss passes by"
        return "after_backward", why
    return "undecided", why
