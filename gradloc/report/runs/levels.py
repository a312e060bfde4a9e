# SPDX-License-Identifier: Apache-2.0
"""Compares a series with its own past: whether it ends above where it was, and whether a single value stands out.

What counts as large is what the series does elsewhere. So noise of any size, two levels, or a mean that starts anew in
each epoch need no rules of their own.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

NEAR = 8
"""Values before another that say what is usual there; as many are a level."""
_ODD = 2.0
"""A move is odd if it is this many times the largest of the others."""
_APART, _FAR = 1.6, 10.0
"""A peak is odd as well if it is this many times the next, and the median deviation from the values before."""
_SPREADS = 3.5
"""Multiple of the median deviation from the values before: less is no peak."""
_LITTLE = 0.05
"""Share of the lower quartile that is added to each."""
_CLIMB = math.log(1.08)
"""Least rise on a logarithmic scale that is worth a word."""
_MOST = 8192
"""Levels at most, for the sake of time."""
_FEW = 4
"""Peaks, at most, that are apart from the others."""
_FIRST_PART = 0.25
"""Part of a jump that its first value has."""
_MOST_BENDS = 200
"""Places at most that are tried as the begin of a slow rise."""


class Rise(NamedTuple):
    """A rise above the lowest level that lasts to the end of a series, measured on its scale."""

    low: range
    """The places of the lowest level."""
    at: int
    """The first place on the upper side of the middle."""
    size: float
    was: float
    """The lowest level."""
    odds: float
    """Its size over the least that is odd, by the other moves of the series: from 1 on it is."""
    is_sudden: bool
    """Whether most of it comes within a few values."""


class Peak(NamedTuple):
    """The value that is the farthest above those before it, measured on the scale of its series."""

    at: int
    size: float
    is_odd: bool
    """Whether it is one of a few that are far above all other such peaks."""


def scaled(values: Sequence[float]) -> list[float]:
    """Return the logarithms of values; the values themselves where one is negative.

    A little is added to each first: near 0 a loss scatters over decades, and a rounded one moves by whole digits.
    """
    if min(values, default=0.0) < 0:
        return [*values]
    low = sorted(values)[len(values) // 4] if values else 0.0
    return [math.log(value + (_LITTLE * low or 1.0)) for value in values]


def rises(scale: Sequence[float]) -> Iterator[Rise]:
    """Yield the rise to the end as medians of single values show it, of two, of four, and so on."""
    width = 1
    while len(scale) > _MOST * width:
        width *= 2
    while width == 1 or len(scale) >= NEAR * width:
        rise = _rise(scale, width)
        if rise is not None:
            yield rise
        width *= 2


def _rise(scale: Sequence[float], width: int) -> Rise | None:
    begin = len(scale) % width
    levels = [median(scale[at : at + width]) for at in range(begin, len(scale), width)]
    smooth = [median(levels[max(at - 1, 0) : at + 2]) for at in range(len(levels))]
    low = min(range(len(levels) - 1), key=smooth.__getitem__, default=0)
    end = median(levels[-min(max(NEAR // width, 2), len(levels) // 3 + 1) :] or [0.0])
    first = len(levels)
    while first and levels[first - 1] > (smooth[low] + end) / 2:
        first -= 1
    if not 2 <= first <= len(levels) - 2 or low >= first:
        return None
    # before the lowest level a rise would be a move like this one, and after it a fall back below the end
    fallen = (-min(level, end) for level in levels[low:])
    before = _largest_rise(levels[: low + 1])
    largest = max(before, _largest_rise(fallen))
    size, was = end - smooth[low], smooth[low]
    near = range(begin + (first - 1) * width + 1, begin + (first + 1) * width)
    # at the least, the fewest values before it are above the middle, and the fewest after it below
    balance = [*accumulate((1 if scale[at] > was + size / 2 else -1 for at in near), initial=0)]
    at = near[min(range(len(near)), key=balance.__getitem__)]
    few = max(width, 5)
    is_sudden = median(scale[at : at + few]) - median(scale[max(at - few, 0) : at]) >= 0.6 * size
    lowest = range(max(begin + (low - 1) * width, 0), begin + min(low + 2, first) * width)
    at = _jump_begin(scale, at, few) if is_sudden else _bend(scale, lowest.start + 1, at, was)
    least = _ODD * (1 + 4 / len(levels)) * largest  # a short series shows little of what it does elsewhere
    return Rise(lowest, at, size, was, size / least if least else math.inf, is_sudden)


def _jump_begin(scale: Sequence[float], at: int, few: int) -> int:
    """Return the first place of a jump that is half done at ``at``."""
    before = scale[max(at - 2 * few, 0) : max(at - few, 1)]
    part = median(before) + _FIRST_PART * (median(scale[at : at + few]) - median(before))
    least = min(part, 2 * max(before) - min(before))
    while at > 1 and scale[at - 1] > least:
        at -= 1
    return at


def _bend(scale: Sequence[float], start: int, end: int, level: float) -> int:
    """Return where a series leaves a level for a slow rise that is half done at ``end``.

    From there a straight line leads to that half; of the places that fit the values about as well, it is the last.
    """
    step = max((end - start) // _MOST_BENDS, 1)
    points = [(at, median(scale[at : at + step])) for at in range(start, end, step)]
    top = median(scale[max(end - step, start) : end + step])

    def error(bend: int) -> float:
        slope = (top - level) / (end - bend)
        return sum((value - level - slope * max(at - bend, 0)) ** 2 for at, value in points)

    errors = {at: error(at) for at, _ in points}
    most = min(errors.values(), default=0.0) * (1 + 4 / max(len(points), 1))
    return max((at for at, value in errors.items() if value <= most), default=end)


def _largest_rise(levels: Iterable[float]) -> float:
    """Return how far levels rise at most, from one to any later one."""
    levels = [*levels]
    return max(level - low for level, low in zip(levels, accumulate(levels, min), strict=True))


def peak(scale: Sequence[float], left_out: Container[int] = ()) -> Peak | None:
    """Return the highest peak above the values before it, at no place ``left_out``; None in too short a series."""
    heights = {at: scale[at] - median(scale[at - NEAR : at]) for at in range(NEAR, len(scale)) if at not in left_out}
    peaks: list[int] = []
    for at in sorted(heights, key=lambda at: -heights[at]):
        if len(peaks) <= _FEW and all(abs(at - other) > NEAR for other in peaks):
            peaks.append(at)
    if not peaks:
        return None
    usual = median([abs(height) for height in heights.values() if height] or [0.0])
    sizes = [heights[at] for at in peaks] + [0.0] * (len(peaks) <= _FEW)
    is_odd = any(a >= _ODD * max(b, _SPREADS * usual) or a >= max(_APART * b, _FAR * usual) for a, b in pairwise(sizes))
    return Peak(peaks[0], sizes[0], is_odd)


class Climb(NamedTuple):
    """The largest rise from one level of a series to a later one, of about forty levels."""

    low: range
    """The places of the lower level."""
    high: range
    size: float


def climb(scale: Sequence[float]) -> Climb | None:
    """Return the largest climb; None where it is hardly more than levels move from one to the next."""
    width = len(scale) // 40 + 1
    levels = [median(scale[max(at - width, 0) : at + 2 * width]) for at in range(0, len(scale), width)]
    lows = [*accumulate(range(len(levels)), lambda low, at: min(low, at, key=levels.__getitem__))]
    sizes = [level - levels[low] for level, low in zip(levels, lows, strict=True)]
    top = max(range(len(levels)), key=sizes.__getitem__, default=0)
    usual = median([abs(b - a) for a, b in pairwise(levels)] or [0.0])
    if not levels or sizes[top] < max(2 * _SPREADS * usual, _CLIMB):
        return None
    low, high = (range(max((at - 1) * width, 0), min((at + 2) * width, len(scale))) for at in (lows[top], top))
    return Climb(low, high, sizes[top])
