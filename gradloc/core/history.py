# SPDX-License-Identifier: Apache-2.0
"""Robust statistics of a positive quantity: the median and the median absolute deviation (MAD) of its logarithm."""

import math
from collections import deque
from statistics import median
from typing import Any, TypedDict

_MAD_TO_SIGMA = 1.4826  # MAD of a normal distribution is sigma / 1.4826
_SIGMA_FLOOR = 0.05  # log units: a run of nearly equal norms must not make a 1% wobble a spike
_LARGEST_EXPONENT = 709.0  # of a float; norms that scatter this far have no threshold
_RELEARN_AFTER = 8  # flagged steps in a row: the level has moved, this is no spike any more


class Summary(TypedDict):
    """What a threshold is made of."""

    num_norms: int
    median_norm: float | None
    """Their level; None without norms."""
    log_sigma: float | None
    """How far the larger ones lie above it, as a standard deviation of the natural logarithm; None without norms."""


class History:
    """Recent log-norms and the adaptive threshold they make.

    Args:
        window: norms to remember.
        warmup: norms needed before there is a threshold.
        num_deviations: robust standard deviations above the median that make a spike.
    """

    def __init__(self, window: int, warmup: int, num_deviations: float):
        self.warmup = warmup
        self.num_deviations = num_deviations
        self._log_norms: deque[float] = deque(maxlen=window)
        self._flagged: list[float] = []

    def threshold(self) -> float | None:
        """The norm above which a step spikes; None until ``warmup`` norms have been seen."""
        if len(self._log_norms) < self.warmup:
            return None
        center, sigma = self._center_and_sigma()
        exponent = center + self.num_deviations * sigma
        return math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf

    def observe(self, grad_norm: float, is_spike: bool) -> None:
        """Learn from one optimizer step. Spikes stay out, unless so many follow each other that the level moved."""
        if not math.isfinite(grad_norm) or grad_norm <= 0:
            return
        if not is_spike:
            self._flagged.clear()
            self._log_norms.append(math.log(grad_norm))
            return
        self._flagged.append(math.log(grad_norm))
        if len(self._flagged) >= _RELEARN_AFTER:
            self._log_norms.clear()
            self._log_norms.extend(self._flagged)
            self._flagged.clear()

    def summary(self) -> Summary:
        """What the threshold is made of."""
        if not self._log_norms:
            return {"num_norms": 0, "median_norm": None, "log_sigma": None}
        center, sigma = self._center_and_sigma()
        return {"num_norms": len(self._log_norms), "median_norm": math.exp(center), "log_sigma": sigma}

    def _center_and_sigma(self) -> tuple[float, float]:
        center = median(self._log_norms)
        deviation = median(abs(value - center) for value in self._log_norms)
        return center, max(_MAD_TO_SIGMA * deviation, _SIGMA_FLOOR)

    def state(self) -> dict[str, Any]:
        """JSON-ready content, for the checkpoint."""
        return {"log_norms": list(self._log_norms), "flagged": list(self._flagged)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        self._log_norms.clear()
        self._log_norms.extend(float(value) for value in state["log_norms"])
        self._flagged = [float(value) for value in state["flagged"]]
