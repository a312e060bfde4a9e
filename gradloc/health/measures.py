# SPDX-License-Identifier: Apache-2.0
"""Measures that rules compare with their limits: one value per step, and a memory of the earlier ones.

Each measure takes finite values only, gives None while it has nothing to say, and keeps what a checkpoint needs.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from ..trigger.history import NormHistory, Recent, middle

_NOISE_FLOOR = 0.02
"""Least standard deviation over the level: after a constant reward any small change would count as a fall."""


class Reading(NamedTuple):
    """A measure's result for one step."""

    found: float
    """The measured number, in the unit of the rule's limits."""
    value: float
    """The metric behind it: the step's value, or a mean over the last steps."""
    typical: float | None = None
    """The run's own usual value, where the rule learns one."""


class Measure:
    """Base of all measures: lists of past values by name, each of a bounded length.

    Args:
        lengths: how many values each list keeps, or a :class:`Recent`, where they are wanted in order. ``recent`` and
            ``streak`` are of consecutive steps.
    """

    needs = 1
    """Number of values before the first reading."""

    def __init__(self, **lengths: int | Recent):
        self._kept: dict[str, Any] = {
            name: deque(maxlen=length) if isinstance(length, int) else length for name, length in lengths.items()
        }

    def observe(self, value: float) -> Reading | None:
        """Take a step's value; return the reading, or None while there is nothing to say."""
        raise NotImplementedError

    def learn(self, value: float, is_flagged: bool) -> None:
        """Learn what is normal, after :meth:`observe`: a value that the rule flagged is not."""

    def resume(self) -> None:
        """Forget the consecutive steps, since an earlier step came again."""
        for name in ("recent", "streak"):
            if name in self._kept:
                self._kept[name].clear()

    def state(self) -> dict[str, Any]:
        """Return the content for the checkpoint, ready for JSON."""
        return {name: list(values) for name, values in self._kept.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        for name, values in self._kept.items():
            values.clear()
            for value in state[name]:
                values.append(float(value))

    def _push(self, value: float) -> float | None:
        """Append to the recent values; return their mean once there are enough."""
        recent = self._kept["recent"]
        recent.append(value)
        return math.fsum(recent) / len(recent) if len(recent) == recent.maxlen else None


class Value(Measure):
    """A function of the step's value, such as ``abs``."""

    def __init__(self, function: Callable[[float], float] = float):
        super().__init__()
        self._function = function

    def observe(self, value: float) -> Reading:
        return Reading(self._function(value), value)


class Mean(Measure):
    """The mean over the last steps: a rule about what lasts."""

    def __init__(self, recent: int):
        super().__init__(recent=recent)
        self.needs = recent

    def observe(self, value: float) -> Reading | None:
        mean = self._push(value)
        return None if mean is None else Reading(mean, mean)


class Share(Measure):
    """Share of the last steps whose value is above a limit."""

    def __init__(self, limit: float, window: int):
        super().__init__(recent=window)
        self._limit, self.needs = limit, window

    def observe(self, value: float) -> Reading | None:
        share = self._push(float(value > self._limit))
        return None if share is None else Reading(share, value, self._limit)


class Streak(Measure):
    """Steps in a row, this one included, whose value is above 0."""

    def __init__(self) -> None:
        super().__init__(streak=1)

    def observe(self, value: float) -> Reading:
        count = (self._kept["streak"] or [0.0])[0] + 1 if value > 0 else 0.0
        self._kept["streak"].append(count)
        return Reading(count, value)


class Jump(Measure):
    """A positive value as a multiple of its own median, where it is also far outside of its own scatter."""

    def __init__(self, warmup: int, window: int, deviations: float):
        super().__init__()
        self._history = NormHistory(window, warmup, deviations)
        self.needs = warmup + 1

    def observe(self, value: float) -> Reading | None:
        threshold = self._history.threshold()
        if threshold is None or value <= threshold:
            return None
        typical = self._history.summary().median_norm
        return Reading(value / typical, value, typical)

    def learn(self, value: float, is_flagged: bool) -> None:
        self._history.observe(value, is_flagged)

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._history.load_state(state)


class AgainstStart(Measure):
    """The mean over the last steps as a multiple of the median of the first values."""

    def __init__(self, warmup: int, recent: int, floor: float = 0.0):
        super().__init__(start=Recent(warmup), recent=recent)
        self._floor, self.needs = floor, warmup + recent

    def observe(self, value: float) -> Reading | None:
        start = self._kept["start"]
        if len(start) < start.maxlen:
            start.append(value)
            return None
        mean = self._push(value)
        typical = max(middle(start.ordered), self._floor)
        if mean is None or typical <= 0 or mean < self._floor:
            return None
        return Reading(mean / typical, mean, typical)


class AgainstWindow(Measure):
    """The mean over the last steps as a multiple of the median of the steps before them."""

    def __init__(self, warmup: int, recent: int, window: int):
        super().__init__(window=Recent(window), recent=recent)
        self._warmup, self.needs = warmup, warmup + recent

    def observe(self, value: float) -> Reading | None:
        recent, before = self._kept["recent"], self._kept["window"]
        if len(recent) == recent.maxlen:
            before.append(recent[0])
        mean = self._push(value)
        if mean is None or len(before) < self._warmup:
            return None
        typical = middle(before.ordered)
        return Reading(mean / typical, mean, typical) if typical > 0 else None


class Fall(Measure):
    """How far the mean over the last steps is below its best.

    In shares of the best, or of the range that the mean went through where that is larger. Silent unless the fall is
    beyond chance: of n means, the largest is about sqrt(2 ln n) of their standard deviations above the expectation,
    and the fall must exceed that and two more, for a difference of two such means. The standard deviation of one value
    is the root mean square of the differences between consecutive ones, over the square root of 2, which a trend
    hardly enters.
    """

    def __init__(self, warmup: int, recent: int, window: int):
        super().__init__(window=window, recent=recent, best=1, worst=1, count=1)
        self._squares: deque[float] = deque(maxlen=window - 1)
        """Squared differences of consecutive values in the window."""
        self._warmup, self.needs = warmup, warmup + 1

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._squares.clear()
        self._squares.extend((after - before) * (after - before) for before, after in pairwise(self._kept["window"]))

    def observe(self, value: float) -> Reading | None:
        values, count = self._kept["window"], self._kept["count"]
        if values:
            self._squares.append((value - values[-1]) * (value - values[-1]))
        values.append(value)
        count.append((count or [0.0])[0] + 1)
        mean = self._push(value)
        if mean is None:
            return None
        best = max([mean, *self._kept["best"]])
        worst = min([mean, *self._kept["worst"]])
        self._kept["best"].append(best)
        self._kept["worst"].append(worst)
        fall, scale = best - mean, max(best - worst, abs(best))
        if count[0] <= self._warmup or fall <= self._chance(max(abs(best), abs(worst))):
            return None
        return Reading(fall / scale, mean, best)

    def _chance(self, level: float) -> float:
        """Return the largest fall that is chance, for values of this size."""
        recent = self._kept["recent"].maxlen
        mean = math.fsum(self._squares) / len(self._squares)
        sigma = max(math.sqrt(mean / 2), _NOISE_FLOOR * level)
        deviations = 2 + math.sqrt(2 * math.log(self._kept["count"][0]))
        return deviations * sigma * math.sqrt(2 / recent)
