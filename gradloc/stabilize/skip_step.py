# SPDX-License-Identifier: Apache-2.0
"""Skip a step whose gradient norm is far above the last ones: the rule of OLMo-core's SkipStepOptimizer.

A step is skipped when its norm is more than ``num_deviations`` standard deviations above the mean of the last
``window`` norms. As there, a skipped norm still enters the window, so a level that really moved is soon accepted, and
one outlier widens the bound for the next steps. We judge by the norm alone, since a policy-gradient loss says little.
"""

import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from .config import SkipStepConfig


class SkipStep:
    """Judges step after step."""

    def __init__(self, settings: SkipStepConfig):
        self._num_deviations = settings.num_deviations
        self._num_needed = settings.window // 2
        self._norms: deque[float] = deque(maxlen=settings.window)

    def threshold(self) -> float | None:
        """Return the norm above which the next step is skipped; None until half a window of norms has been seen."""
        if len(self._norms) < self._num_needed:
            return None
        return statistics.fmean(self._norms) + self._num_deviations * statistics.stdev(self._norms)

    def is_outlier(self, norm: float, is_over: Callable[[float, float], bool] = operator.gt) -> bool:
        """Return whether to skip the step; learns its norm either way, unless it is not finite.

        Args:
            norm: of the step.
            is_over: compares it with the threshold, for all ranks.
        """
        threshold = self.threshold()
        if not math.isfinite(norm):
            return False
        self._norms.append(norm)
        return threshold is not None and is_over(norm, threshold)

    def state(self) -> dict[str, Any]:
        """Return the content for the checkpoint, ready for JSON."""
        return {"norms": list(self._norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` gave."""
        self._norms.clear()
        self._norms.extend(float(norm) for norm in state["norms"])
