# SPDX-License-Identifier: Apache-2.0
"""Is this gradient norm a spike? Pure rules over numbers; nothing here measures.

The fixed rule is GradLoc's (docs/method.md, section 5). docs/trigger.md has the adaptive one, and why each of its
statistics was chosen. It has a history for each mini-batch position within a trainer step, since later mini-batches
are further off-policy and have other norms. Arithmetic is on logarithms of norms, so that a factor is a distance and no
unit matters.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any, NamedTuple

from ..record import History
from .history import LARGEST_EXPONENT, Recent, middle

_DECILE = 0.9  # quantile; a tenth of the norms may be spikes or hard batches without moving it far
_DECILE_OF_NORMAL = round(NormalDist().inv_cdf(_DECILE), 4)  # of a standard normal distribution
_DOUBLING = math.log(2.0)
"""A factor of two between norms. The threshold is that far above the ninth decile. Norms closer than that are one heavy
tail and not two groups. A run of spikes whose later half is higher by more still grows."""
_GROUP = 8  # an upper group has at least one norm in this many, and at least 3; fewer are spikes
_FALL = 16  # norms in a row below the median: by chance once in 2^16 = 65,536 steps


def fixed_threshold(tau: float, num_tokens: int) -> float:
    """Return the published threshold tau / sqrt(N) on the mini-batch's gradient norm; inf without response tokens."""
    return tau / math.sqrt(num_tokens) if num_tokens > 0 else math.inf


@dataclass(frozen=True)
class Spike:
    """The numbers by which a mini-batch is searched."""

    kind: str
    """``fixed``, ``adaptive``, ``non_finite``, or ``forced`` on a rehearsal, which is no spike."""
    grad_norm: float
    """The mini-batch's, before clipping."""
    threshold: float | None
    """The norm above which it is a spike; None on a rehearsal and during the warm-up."""
    tau: float | None
    """The published threshold per token; None where there is none."""
    num_tokens: int
    """N, response tokens of the mini-batch over all ranks."""
    history: History | None = None
    """The statistics behind the adaptive threshold; None with the fixed rule."""


def spike_kind(grad_norm: float, threshold: float | None, kind: str) -> str | None:
    """Return ``non_finite`` for NaN and inf, ``kind``, the threshold's rule, for a norm over it, else None."""
    if not math.isfinite(grad_norm):
        return "non_finite"
    return kind if threshold is not None and grad_norm > threshold else None


class AdaptiveThreshold:
    """The threshold of each mini-batch position, learned from the norms of trainer steps.

    Args:
        window: trainer steps that a position remembers, at least 8.
        warmup: norms that a position needs before it has a threshold.
        floor: the threshold is at least this many times the level.
        cap: the threshold is at most this many times the level.

    Raises:
        ValueError: if warmup is over window, or floor over cap.
    """

    def __init__(self, window: int = 64, warmup: int = 16, floor: float = 4.0, cap: float = 10.0):
        if warmup > window:
            raise ValueError(f"warmup must be at most window ({window}), found {warmup}.")
        if floor > cap:
            raise ValueError(f"floor must be at most cap ({cap:g}), found {floor:g}: set both where one is not set.")
        self._settings = (window, warmup, math.log(floor), math.log(cap))
        self._positions: list[_Position] = []

    def threshold(self, position: int) -> float | None:
        """Return the norm above which this position is a spike in the next step; None until ``warmup`` norms
        are known.
        """
        return self._at(position).threshold()

    def observe(self, step_norms: Sequence[float]) -> list[bool]:
        """Learn from one trainer step; returns which of its norms were spikes, by the thresholds before this step.

        Args:
            step_norms: norms before clipping and before any action, of all epochs x mini-batches in order. NaN and inf
                are spikes. 0, a step without a gradient, is none. Neither says anything about the level.
        """
        return [self._at(position).observe(norm) for position, norm in enumerate(step_norms)]

    def summary(self, position: int = 0) -> History:
        """Return the statistics behind a position's threshold; ``log_sigma`` as of a normal with this ninth decile."""
        return self._at(position).summary()

    def state(self) -> dict[str, Any]:
        """Return the content for the checkpoint, ready for JSON: at most twice ``window`` numbers for each position."""
        return {"positions": [position.state() for position in self._positions]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._positions = []
        for number, saved in enumerate(state["positions"]):
            self._at(number).load_state(saved)

    def _at(self, position: int) -> "_Position":
        while len(self._positions) <= position:
            self._positions.append(_Position(*self._settings))
        return self._positions[position]


class _Fit(NamedTuple):
    """Statistics of a position's norms, as logarithms."""

    threshold: float
    median: float
    level: float
    """The median of the upper group of norms, or of all where there is one group."""
    decile: float
    """The ninth."""


class _Position:
    """One mini-batch position: its recent log-norms, and the run of spikes that it is in."""

    def __init__(self, window: int, warmup: int, floor: float, cap: float):
        self._warmup, self._floor, self._cap = warmup, floor, cap
        self._norms = Recent(window)
        self._run: deque[float] = deque(maxlen=window)

    def threshold(self) -> float | None:
        if len(self._norms) < self._warmup:
            return None
        exponent = self._fit().threshold
        return math.exp(exponent) if exponent < LARGEST_EXPONENT else math.inf

    def observe(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        threshold = self.threshold()
        value = math.log(norm)
        if threshold is None or norm <= threshold:
            self._run.clear()
            self._norms.append(value)
            self._start_again_if_fallen()
            return False
        self._run.append(value)
        if len(self._run) == 1:
            self._norms.append(value)
        elif len(self._run) == self._run.maxlen and self._is_settled():
            self._start_again(self._run)
        return True

    def summary(self) -> History:
        if not self._norms:
            return History()
        fit = self._fit()
        return History(len(self._norms), math.exp(fit.level), max(fit.decile - fit.level, 0.0) / _DECILE_OF_NORMAL)

    def state(self) -> dict[str, Any]:
        return {"log_norms": list(self._norms), "run": list(self._run)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._start_again(state["log_norms"])
        self._run.extend(map(float, state["run"]))

    def _fit(self) -> _Fit:
        norms, count = self._norms.ordered, len(self._norms)
        center = middle(norms)
        level = middle(_upper_group(norms, center + self._cap) or norms)
        decile = norms[min(int(_DECILE * count), count - 1)]
        # The decile of few norms is uncertain, with an error that falls as the root of their number. So the
        # threshold comes down to its place as the window fills.
        reach = _DOUBLING + 0.5 * math.log(self._norms.maxlen / count)
        threshold = min(max(decile + reach, level + self._floor), level + self._cap)
        return _Fit(threshold, center, level, decile)

    def _start_again(self, values: Sequence[float]) -> None:
        self._norms.replace(values)
        self._run.clear()

    def _start_again_if_fallen(self) -> None:
        length = max(_FALL, self._warmup)
        if len(self._norms) <= length:
            return
        last = list(self._norms)[-length:]
        if max(last) < self._fit().median:
            self._start_again(last)

    def _is_settled(self) -> bool:
        values = list(self._run)
        half = len(values) // 2
        return median(values[half:]) - median(values[:half]) < _DOUBLING


def _upper_group(ordered: Sequence[float], cap: float) -> Sequence[float]:
    """Return the norms above the highest gap that is over the median and below enough norms; empty for one group.

    Looked for only if a threshold at ``cap`` would cut off an upper group: if the second largest norm is beyond it.
    All are log-norms, ascending.
    """
    count = len(ordered)
    if count < 2 or ordered[-2] <= cap:
        return []
    least = max(-(-count // _GROUP), 3)
    for start in range(count - least, count // 2 - 1, -1):
        if start > 0 and ordered[start] - ordered[start - 1] > _DOUBLING:
            return ordered[start:]
    return []
