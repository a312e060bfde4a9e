# SPDX-License-Identifier: Apache-2.0
"""A short description of a model's weights, by which a replay tells whether it was given those of the event.

Per parameter: how many weights, their sum and their sum of squares, in float64. All three add up over shards, so FSDP
needs one reduction, the number of ranks changes them by rounding only, and a merged checkpoint gives the same. One
optimizer step moves a sum by about lr * sqrt(n), which is far above that rounding; a hash would be exact but does not
add up over shards. FSDP1's flat parameters hide the names: then only the whole model's totals are known.
"""

import math
import re

import torch

from ..core.gradients import GradientSpace, squared_norms
from ..core.sharding import local_shard
from ..record import Fingerprint, Weights

_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")
_ROUNDING = 1e-11  # of float64 sums, relative to the largest they could be; 1e-15 was measured between shardings
_HALF_ULP = 2.0**-9  # of bfloat16, relative: what saving in half precision does to a weight at most
_NUM_SIGMAS = 8.0
_KURTOSIS = 30.0  # mean fourth power over squared mean square, generous for weights


@torch.no_grad()
def fingerprint(space: GradientSpace) -> Fingerprint:
    """Describe the trainable weights; all ranks call this together and get the same. One reduction.

    With FSDP1's flat parameters the number of weights includes its padding.
    """
    shards = [local_shard(param) for param in space.counted(space.params) if param is not None]

    def local() -> torch.Tensor:
        sums = torch.stack([shard.sum(dtype=torch.float64) for shard in shards])
        return torch.stack(
            [sums.new_tensor([shard.numel() for shard in shards]), sums, squared_norms(shards, are_weights=True)], 1
        )

    values = space.reduce(local)
    names = [_WRAPPERS.sub("", name) for name in space.names]
    rows = values.tolist()
    by_name = {name: _entry(row) for name, row in zip(names, rows, strict=True)}
    total = _entry([sum(column) for column in zip(*rows, strict=True)])
    return Fingerprint(total=total, parameters=by_name if space.has_names else None)


def is_other_model(expected: Fingerprint, found: Fingerprint) -> str | None:
    """Say how the two fingerprints cannot be of one architecture; None when they can.

    Parameters that only one of them knows, or another number of weights. Not decided for FSDP1's flat parameters.
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
    """How the weights at hand differ from those in ``meta.json``; None when they are the same up to float64 rounding.

    The sentence says so where rounding the weights to bfloat16 would explain the difference.

    >>> same = Fingerprint(total=(4, 1.0, 2.0), parameters=None)
    >>> differs(same, same) is None
    True
    """
    other = is_other_model(expected, found)
    if other is not None:
        return f"This is another model than the event's: {other}."
    before, now = expected.parameters, found.parameters
    has_names = before is not None and now is not None
    if before is None or now is None:
        before, now = {"": expected.total}, {"": found.total}
    off = [name for name in before if not _is_close(before[name], now[name], *_float64_slack(before[name]))]
    if not off:
        return None
    how_many = f"in {len(off)} of {len(before)} parameters" if has_names else "in their totals"
    if all(_is_close(before[name], now[name], *_bfloat16_slack(before[name])) for name in off):
        return (
            f"The weights differ from those of the event {how_many}, by no more than rounding to bfloat16 would: "
            "they may be the same ones, saved in half precision, or those of a step nearby."
        )
    worst = max(off, key=lambda name: _distance(before[name], now[name]))
    rms = [math.sqrt(max(entry[2], 0.0) / max(entry[0], 1)) for entry in (before[worst], now[worst])]
    return (
        f"The weights differ from those of the event {how_many}{f', in {worst} most' if worst else ''}: the sum there "
        f"is {now[worst][1]:.9g} (root mean square {rms[1]:.9g}), it was {before[worst][1]:.9g} "
        f"({rms[0]:.9g})."
    )


def _entry(row: list[float]) -> Weights:
    count, total, square = row
    return int(count), total, square


def _float64_slack(entry: Weights) -> tuple[float, float]:
    """How far rounding in float64 can move the sum (at most sqrt(n * sum of squares)) and the sum of squares."""
    count, _, square = entry
    return _ROUNDING * math.sqrt(max(count * square, 0.0)), _ROUNDING * square


def _bfloat16_slack(entry: Weights) -> tuple[float, float]:
    """How far rounding every weight to bfloat16, independently, moves the two sums, in 8 standard deviations.

    Var[sum dw] <= h^2 sum w^2 and Var[sum 2 w dw] <= 4 h^2 sum w^4 with h half a unit in the last place, relative.
    """
    count, _, square = entry
    of_squares = 2 * _NUM_SIGMAS * _HALF_ULP * square * min(math.sqrt(_KURTOSIS / max(count, 1.0)), 1.0)
    return _NUM_SIGMAS * _HALF_ULP * math.sqrt(max(square, 0.0)), of_squares + _HALF_ULP**2 * square


def _is_close(ours: Weights, theirs: Weights, sum_slack: float, square_slack: float) -> bool:
    return _near(ours[1], theirs[1], sum_slack) and _near(ours[2], theirs[2], square_slack)


def _near(a: float, b: float, slack: float) -> bool:
    """What is not finite is near itself only."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) <= slack
    return slack == math.inf or a == b or (math.isnan(a) and math.isnan(b))


def _distance(ours: Weights, theirs: Weights) -> float:
    """How far two entries are apart, in units of the float64 slack; what is not finite counts as farthest."""
    slacks = _float64_slack(ours)
    apart = [abs(a - b) / max(s, 1e-300) for a, b, s in zip(ours[1:], theirs[1:], slacks, strict=True)]
    return max((value if math.isfinite(value) else math.inf) for value in apart)
