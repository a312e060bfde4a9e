# SPDX-License-Identifier: Apache-2.0
"""Ends a sentence on a loss in which nothing was found: how it went from its first value to its last."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from ...explain.numbers import number
from ...explain.text import plural
from .levels import NEAR, climb, peak, scaled

Points = Sequence[tuple[int, float]]
"""Steps and finite values."""
_LONG = 40
"""Values from which the last may be far off the others near it."""
_SHORT = 30
"""Values below which a little is not worth a word."""


def course(known: Points) -> str:
    """Return the first clause that fits a loss, the plainest last.

    >>> course([(step, 2.0 + 0.001 * (step % 2)) for step in range(40)])
    ', and hardly moved: all its 40 values are about 2.'
    """
    clauses = (
        _mostly_zero,
        _got_stuck,
        _hardly_moved,
        _jumped_early,
        _jumped,
        _climbed,
        past_its_best,
        _did_not_fall,
        _level_since,
        _stood_out,
    )
    return next(filter(None, (clause(known) for clause in clauses)), _went_on(known))


def reward_course(known: Points) -> str:
    """Return the first clause that fits a reward, which is to rise."""
    turned = [(step, -value) for step, value in known]
    found = past_its_best(turned, "highest") or _fell_and_came_back(turned) or _level_since(turned, sign=-1)
    return found or "."


def _fell_and_came_back(turned: Points) -> str:
    """Name the deepest fall of a reward, given with its sign turned, and where it was made good."""
    values = [value for _, value in turned]
    fall = climb(values) if len(values) >= _SHORT else None
    if fall is None or fall.size < (max(values) - min(values)) / 4:
        return ""
    was, low = (median(values[at.start : at.stop]) for at in (fall.low, fall.high))
    (begin, _), (bottom, _) = (turned[at[len(at) // 2]] for at in (fall.low, fall.high))
    rest = range(fall.high.stop, len(values) - NEAR)
    back = next((turned[at + NEAR // 2][0] for at in rest if median(values[at : at + NEAR]) <= was), None)
    end = f", and was back at about step {back}" if back is not None else ""
    return f"; it fell from {number(-was, 3)} around step {begin} to {number(-low, 3)} around step {bottom}{end}."


def _fell_on(known: Points) -> bool:
    """Return whether values fall in nearly each row, so that even a few show how a loss went."""
    falls = sum(after < before for (_, before), (_, after) in pairwise(known))
    return len(known) >= NEAR and falls >= 0.8 * (len(known) - 1)


def end_of(known: Points) -> float | None:
    """Return the median of the last values where the very last is far off it; None where it is not."""
    if len(known) < _LONG:
        return None
    level, end = median(value for _, value in known[-max(len(known) // 20, 5) :]), known[-1][1]
    return level if abs(level - end) > abs(level) / 10 else None


def _went_on(known: Points) -> str:
    """Say how far values that show nothing else went."""
    begin, end = known[0][1], end_of(known) or known[-1][1]
    share = ""
    if min(begin, end) > 0:
        share = f": {number(100 * abs(end / begin - 1), 2)} % {'lower' if end < begin else 'higher'}"
    if _fell_on(known):
        return f"{share}, falling in almost every row."
    return f"{share}, and none of its {plural(len(known), 'value')} is twice those around it."


def _mostly_zero(known: Points) -> str:
    """Say in how many rows a loss is 0, where in most."""
    zeros = sum(value == 0 for _, value in known)
    return f", and is 0 in {zeros} of its {plural(len(known), 'row')}." if zeros < len(known) < 2 * zeros else ""


def _jumped_early(known: Points) -> str:
    """Name a single value among the first ones that is far above the one before and those after."""
    values = [value for _, value in known]
    for at in range(1, min(NEAR, len(values) - NEAR)):
        least = max(values[at - 1], median(values[at + 1 : at + 1 + NEAR]))
        if values[at] > 10 * least > 0:
            times = f"{number(values[at] / least, 2)} times the values around it"
            return f"; its largest jump, to {number(values[at], 3)} at step {known[at][0]}, is {times}."
    return ""


def _got_stuck(known: Points) -> str:
    """Name the value that the last third or more of a loss has."""
    values = [value for _, value in known]
    count = next((at for at, value in enumerate(reversed(values)) if value != values[-1]), len(values))
    if count < max(NEAR // 2, len(values) / 3) or count == len(values):
        return ""
    return f", and is {number(values[-1], 3)} in each of its last {plural(count, 'value')}."


def _hardly_moved(known: Points) -> str:
    values = [value for _, value in known]
    low, high, third = min(values), max(values), -(-len(values) // 3)
    moved = abs(median(values[:third]) - median(values[-third:]))
    if moved >= abs(high) / 200 or high - low >= abs(high) / 20:
        return ""
    least, most = number(low, 3), number(high, 3)
    span = f"about {least}" if least == most else f"between {least} and {most}"
    return f", and hardly moved: all its {plural(len(known), 'value')} are {span}."


def _jumped(known: Points) -> str:
    """Name the largest jump above the values before it, where no climb is larger."""
    values = [value for _, value in known]
    scale = scaled(values)
    climbed, jump = climb(scale), peak(scale)
    if jump is None or jump.size <= max(math.log(1.2 if jump.is_odd else 2), climbed.size if climbed else 0.0):
        return ""
    was, (step, top) = median(values[jump.at - NEAR : jump.at]), known[jump.at]
    if was <= 0:
        return ""
    back = next((at for at, value in known[jump.at + 1 :] if value <= 1.2 * was), None)
    end = "is not back at the end" if back is None else f"was back at step {back}"
    times = f"{number(top / was, 2)} times the values before it"
    if not jump.is_odd and (level := _level_since(known)):
        return level  # such jumps are its noise
    return f"; its largest jump, to {number(top, 3)} at step {step}, {times}, {end}."


def _climbed(known: Points) -> str:
    values = [value for _, value in known]
    climbed = climb(scaled(values))
    if climbed is None or len(values) < _SHORT and climbed.size <= math.log(1.5):
        return ""
    low, high = (
        f"{number(median(values[at.start : at.stop]), 3)} around step {known[at[len(at) // 2]][0]}"
        for at in (climbed.low, climbed.high)
    )
    return f"; it rose from {low} to {high}."


def past_its_best(known: Points, best: str = "lowest") -> str:
    """Say that values end above their lowest level, see :func:`best_level`; empty where they do not.

    Values that are best when they are ``highest``, such as rewards, are given with their signs turned.
    """
    if (found := best_level(known)) is None:
        return ""
    (was, step, now), sign = found, -1 if best == "highest" else 1
    levels = f"{number(sign * was, 3)}, around step {step}, and its last is {number(sign * now, 3)}"
    return f"; its {best} level was {levels} (medians)."


def best_level(known: Points) -> tuple[float, int, float] | None:
    """Return the median of the last sixth of the values that is as low as any, a step within it, and the median of the
    last sixth of all; None where that is not above it by more than such parts scatter.
    """
    size = len(known) // 6
    if size < NEAR:
        return None
    ends = [len(known) - back * size for back in range(6)]
    parts = [[value for _, value in known[end - size : end]] for end in ends]
    middles = [*map(median, parts)]
    low = min(range(6), key=middles.__getitem__)
    was, now = middles[low], middles[0]
    scatter = median(abs(value - middles[part]) for part in (low, 0) for value in parts[part])
    bound = max(6 * scatter / math.sqrt(size), abs(was) / 20)
    if not was or now - was < bound:
        return None
    last = next(part for part in range(6) if middles[part] <= was + bound / 2)
    return middles[last], known[ends[last] - size // 2][0], now


def _did_not_fall(known: Points) -> str:
    values = [value for _, value in known]
    begin, third = median(values[:NEAR]), len(values) // 3
    if len(values) < _SHORT:
        return ""
    middles = [median(values[:third]), median(values[-third:])]
    if max(abs(begin - middles[1]), abs(middles[0] - middles[1])) >= abs(begin) / 50:
        return ""
    levels = f"{number(begin, 3)} in the first rows and {number(middles[1], 3)} in the last third"
    return f", and did not fall: its median is {levels}."


def _level_since(known: Points, sign: int = 1) -> str:
    """Say from where on the values have one level, if that is within their first half; ``sign`` is -1 where they are
    given with their signs turned.
    """
    values = [value for _, value in known]
    for begin in (len(values) * part // 12 for part in range(1, 7)):
        rest, third = values[begin:], (len(values) - begin) // 3
        if third < NEAR:
            return ""
        level, middle, end = median(rest[:third]), median(rest[third:-third]), median(rest[-third:])
        scatter = median(abs(value - level) for value in rest[:third]) / math.sqrt(third)
        moved = max(abs(end - level), abs(middle - level))
        least = max(2 * scatter, abs(level) / 100)
        if moved < least and median(values[:3]) - level > abs(level) / 20:
            while begin > NEAR and abs(median(values[begin - NEAR : begin]) - level) < least:
                begin -= NEAR
            span = f"{number(sign * level, 3)}, then {number(sign * end, 3)}"
            return f", and has been level since about step {known[begin][0]}: {span}."
    return ""


def _stood_out(known: Points) -> str:
    """Name the value that is the highest multiple of those around it, from two on."""
    values, side = [value for _, value in known], NEAR // 2
    around = [
        median([*values[max(at - side, 0) : at], *values[at + 1 : at + 1 + side]] or [0.0]) for at in range(len(values))
    ]
    rises = (at for at in range(1, len(values)) if at >= side or values[at] > 2 * values[at - 1])
    at = max(rises, key=lambda at: values[at] / (around[at] or math.inf), default=0)
    if not at or not values[at] > 2 * around[at] > 0:
        return ""
    step, value = known[at]
    return f"; its value at step {step}, {number(value, 3)}, is {number(value / around[at], 2)} times those around it."
