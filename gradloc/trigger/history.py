# SPDX-License-Identifier: Apache-2.0
"""Learn what is typical of a run: median and median absolute deviation (MAD) of logarithms.

Logarithms, because norms scatter by factors. Medians, because a spike must not move what is typical.
:class:`NormHistory` follows one quantity, such as a norm, and gives a threshold. :class:`ScaleHistory` follows several
numbers of each batch: only the run's past shows that a whole batch is off.
"""

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist, median_low
from typing import Any

from ..record import History

_MAD_TO_SIGMA = round(1 / NormalDist().inv_cdf(0.75), 4)  # of a normal distribution
_SIGMA_FLOOR = 0.05  # log units: a run of nearly equal norms must not make a 1% wobble a spike
LARGEST_EXPONENT = math.floor(math.log(sys.float_info.max))  # exp() of more overflows: no threshold
_LEAST_STEPS = 4  # with fewer, nothing is known to be typical
UNUSUAL = 3.0
"""Times what is typical: a factor that healthy batches do not reach. Normed advantages scatter by less."""
_DEVIATIONS = 4.0  # robust standard deviations, which an unusual value exceeds as well
_RELEARN_AFTER = 8  # flagged steps in a row: the level has moved, these are no spikes any more


def middle(ordered: Sequence[float]) -> float:
    """Return the median of ascending numbers, of which there is at least one."""
    at = len(ordered) // 2
    return ordered[at] if len(ordered) % 2 else (ordered[at - 1] + ordered[at]) / 2


class Recent:
    """The last numbers in the order of arrival, and sorted. NaN is none of them.

    Args:
        maxlen: numbers remembered; a further one takes the place of the oldest.
    """

    def __init__(self, maxlen: int):
        self.maxlen = maxlen
        self.clear()

    def __len__(self) -> int:
        return len(self.ordered)

    def __iter__(self) -> Iterator[float]:
        return iter(self._arrived)

    def replace(self, values: Iterable[float]) -> None:
        """Remember these numbers alone."""
        self._arrived = deque(map(float, values), maxlen=self.maxlen)
        self.ordered = sorted(self._arrived)
        """The numbers, ascending."""

    def clear(self) -> None:
        """Forget all numbers."""
        self.replace(())

    def append(self, value: float) -> None:
        """Remember one more number."""
        if len(self.ordered) == self.maxlen:
            del self.ordered[bisect_left(self.ordered, self._arrived[0])]
        self._arrived.append(value)
        insort(self.ordered, value)

    def median_distance(self, center: float) -> float:
        """Return the median absolute distance from a center, such as the median: then it is the MAD."""
        return middle(sorted([abs(value - center) for value in self.ordered]))


class NormHistory:
    """Recent log-norms, and the threshold ``exp(median + num_deviations * sigma)`` that they give.

    Args:
        window: norms remembered.
        warmup: norms needed before there is a threshold.
        num_deviations: robust standard deviations (sigma = 1.4826 MAD, at least 0.05) from the median to the threshold.
    """

    def __init__(self, window: int, warmup: int, num_deviations: float):
        self.warmup = warmup
        self.num_deviations = num_deviations
        self._log_norms = Recent(window)
        self._flagged: list[float] = []

    def threshold(self) -> float | None:
        """Return the norm above which a step spikes; None until ``warmup`` norms have been seen."""
        if len(self._log_norms) < self.warmup:
            return None
        center, sigma = self._center_and_sigma()
        exponent = center + self.num_deviations * sigma
        return math.exp(exponent) if exponent < LARGEST_EXPONENT else math.inf

    def observe(self, grad_norm: float, is_spike: bool) -> None:
        """Learn from one optimizer step. Spikes are left out until eight in a row: then they are the new level.

        NaN, inf and 0 are ignored.
        """
        if not math.isfinite(grad_norm) or grad_norm <= 0:
            return
        if not is_spike:
            self._flagged.clear()
            self._log_norms.append(math.log(grad_norm))
            return
        self._flagged.append(math.log(grad_norm))
        if len(self._flagged) >= _RELEARN_AFTER:
            self._log_norms.replace(self._flagged)
            self._flagged.clear()

    def summary(self) -> History:
        """Return the statistics behind the threshold, for the record."""
        if not self._log_norms:
            return History()
        center, sigma = self._center_and_sigma()
        return History(len(self._log_norms), math.exp(center), sigma)

    def _center_and_sigma(self) -> tuple[float, float]:
        center = middle(self._log_norms.ordered)
        return center, max(_MAD_TO_SIGMA * self._log_norms.median_distance(center), _SIGMA_FLOOR)

    def state(self) -> dict[str, Any]:
        """Return the content for the checkpoint, ready for JSON."""
        return {"log_norms": list(self._log_norms), "flagged": list(self._flagged)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._log_norms.replace(state["log_norms"])
        self._flagged = [float(value) for value in state["flagged"]]


class ScaleHistory:
    """Numbers of the last batches by name, such as the median |coefficient| of a batch, and what is typical of them.

    Args:
        window: steps remembered.
    """

    def __init__(self, window: int = 64):
        self._values: dict[str, deque[float]] = {}
        self._window = window

    def observe(self, values: Mapping[str, float]) -> None:
        """Remember one step's numbers; 0, negatives, NaN and inf are passed over."""
        for name, value in values.items():
            if math.isfinite(value) and value > 0:
                self._values.setdefault(name, deque(maxlen=self._window)).append(float(value))

    def typical(self) -> dict[str, tuple[float, float]]:
        """Return by name the median, and which multiple of it is unusual. Names with fewer than four steps are absent.

        The factor is exp(4 robust standard deviations of the logarithm), at least 3.
        """
        found = {}
        for name, values in self._values.items():
            if len(values) >= _LEAST_STEPS:
                logs = [math.log(value) for value in values]
                center = median_low(logs)
                spread = _MAD_TO_SIGMA * median_low(abs(log - center) for log in logs)
                found[name] = math.exp(center), max(UNUSUAL, math.exp(min(_DEVIATIONS * spread, LARGEST_EXPONENT)))
        return found

    def state(self) -> dict[str, Any]:
        """Return the content, ready for JSON."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for name, values in state.items():
            self._values[name] = deque((float(value) for value in values), maxlen=self._window)


def excess(value: float, typical: tuple[float, float]) -> float | None:
    """Return a value over the typical one (:meth:`ScaleHistory.typical`); None if that is not unusual."""
    center, usual = typical
    return value / center if center > 0 and value / center >= usual else None
