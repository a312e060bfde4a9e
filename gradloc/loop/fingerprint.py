# SPDX-License-Identifier: Apache-2.0
"""A short description of a model's weights, by which a replay checks whether it was given those of the event.

Per parameter: how many weights, their sum and their sum of squares, in float64. All three add up over shards, so FSDP
needs one reduction, the number of ranks changes them by rounding only, and a merged checkpoint gives the same. One
optimizer step moves a sum by about lr * sqrt(n), which is far above that rounding; a hash would be exact but does not
add up over shards. FSDP1's flat parameters hide the names: then only the whole model's totals are known.
"""

import math

import torch

from ..core.gradients import GradientSpace, squared_norms, totals_of
from ..core.sharding import local_shard, plain_name
from ..record.bundle import Fingerprint, Weights

_ROUNDING = 1e-11  # of float64 sums, relative to the largest they could be; 1e-15 was measured between shardings
_HALF_ULP = 2.0**-9  # of bfloat16, relative: what saving in half precision does to a weight at most
_NUM_SIGMAS = 8.0  # standard deviations that a sum may be off by
_KURTOSIS = 30.0  # mean fourth power over squared mean square, generous for weights


def fingerprint(space: GradientSpace) -> Fingerprint:
    """Describe the trainable weights; all ranks call this together and get the same. One reduction."""
    return fingerprint_from(space, space.reduce(lambda: own_weight_sums(space)))


@torch.no_grad()
def own_weight_sums(space: GradientSpace) -> torch.Tensor:
    """Return the number of weights, their sum and their sum of squares of this process' shards: (num_params, 3)."""
    shards = [local_shard(param) for param in space.counted(space.params) if param is not None]
    sums = totals_of(shards)
    return torch.stack(
        [sums.new_tensor([shard.numel() for shard in shards]), sums, squared_norms(shards, are_weights=True)], 1
    )


def fingerprint_from(space: GradientSpace, values: torch.Tensor) -> Fingerprint:
    """Describe the trainable weights by :func:`own_weight_sums`, summed over all shards.

    With FSDP1's flat parameters the number of weights includes its padding.
    """
    names = [plain_name(name) for name in space.names]
    rows = values.tolist()
    by_name = {name: _entry(row) for name, row in zip(names, rows, strict=True)}
    total = _entry([sum(column) for column in zip(*rows, strict=True)])
    return Fingerprint(total=total, parameters=by_name if space.has_names else None)


def is_other_model(expected: Fingerprint, found: Fingerprint) -> str | None:
    """Say how the two fingerprints cannot be of one architecture; None when they can.

    One may have a parameter that the other lacks, or another number of weights. FSDP1's flat parameters decide nothing.
    """
    ours, theirs = expected.parameters, found.parameters
    if ours is None or theirs is None:
        return None
    for here, there, whose in ((ours, theirs, "the event's"), (theirs, ours, "the given")):
        alone = sorted(set(here) - set(there))
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            return f"only {whose} model has the parameter {alone[0]}{more}"
    for name, (count, *_) in ours.items():
        if count != theirs[name][0]:
            return f"{name} has {int(count)} weights in the event's model and {int(theirs[name][0])} in the given one"
    return None


def differs(expected: Fingerprint, found: Fingerprint) -> str | None:
    """Say how the present weights differ from those in ``meta.json``; None when they agree up to float64 rounding.

    The sentence says so where rounding the weights to bfloat16 would explain the difference.

    >>> same = Fingerprint(total=(4, 1.0, 2.0), parameters=None)
    >>> differs(same, same) is None
    True
    """
    other = is_other_model(expected, found)
    if other is not None:
        return f"This is another model than the event's: {other}."
    before, now = expected.parameters, found.parameters
    where = "in {} of {} parameters"
    if before is None or now is None:
        before, now, where = {"": expected.total}, {"": found.total}, "in their totals"
    distances = {name: _distance(entry, now[name], _float64_slack(entry)) for name, entry in before.items()}
    off = [name for name, distance in distances.items() if distance > 1]
    if not off:
        return None
    said = f"The weights differ from those of the event {where.format(len(off), len(before))}"
    if all(_distance(before[name], now[name], _bfloat16_slack(before[name])) <= 1 for name in off):
        return (
            f"{said}, by no more than rounding to bfloat16 would: they may be the same ones, saved in half precision, "
            "or those of a step nearby."
        )
    worst = max(off, key=lambda name: distances[name])
    return f"{said}{f', in {worst} most' if worst else ''}."


def _entry(row: list[float]) -> Weights:
    count, total, square = row
    return int(count), total, square


def _float64_slack(entry: Weights) -> tuple[float, float]:
    """Bound the rounding error in float64 of the sum (at most sqrt(n * sum of squares)) and of the sum of squares."""
    count, _, square = entry
    return _ROUNDING * math.sqrt(max(count * square, 0.0)), _ROUNDING * square


def _bfloat16_slack(entry: Weights) -> tuple[float, float]:
    """Bound how far rounding every weight to bfloat16, independently, moves the two sums: 8 standard deviations.

    Var[sum dw] <= h^2 sum w^2 and Var[sum 2 w dw] <= 4 h^2 sum w^4 with h half a unit in the last place, relative.
    """
    count, _, square = entry
    squares_error = 2 * _NUM_SIGMAS * _HALF_ULP * square * min(math.sqrt(_KURTOSIS / max(count, 1.0)), 1.0)
    return _NUM_SIGMAS * _HALF_ULP * math.sqrt(max(square, 0.0)), squares_error + _HALF_ULP**2 * square


def _distance(ours: Weights, theirs: Weights, slacks: tuple[float, float]) -> float:
    """Return the larger distance of the two sums, in units of their slack; a non-finite sum is near itself only."""
    apart = 0.0
    for a, b, slack in zip(ours[1:], theirs[1:], slacks, strict=True):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            units = abs(a - b) / max(slack, 1e-300)
            apart = max(apart, units) if math.isfinite(units) else math.inf
    return apart
