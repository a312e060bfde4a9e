# SPDX-License-Identifier: Apache-2.0
"""Whether a whole batch is scaled: a few robust numbers of each step, and how far the present ones are above them.

What is typical within a batch cannot tell that the batch itself is off; the run's own history can.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

_LEAST = 4  # steps, before anything is called typical
_NOTABLE = 3.0
_DEVIATIONS = 4.0


class ScaleHistory:
    """Robust numbers of the last steps: each the median over a batch.

    Args:
        window: steps remembered.
    """

    def __init__(self, window: int = 64):
        self._values: dict[str, deque[float]] = {}
        self._window = window

    def observe(self, values: Mapping[str, float]) -> None:
        """Remember a step's; what is not a positive number is passed over."""
        for name, value in values.items():
            if math.isfinite(value) and value > 0:
                self._values.setdefault(name, deque(maxlen=self._window)).append(float(value))

    def typical(self) -> dict[str, tuple[float, float]]:
        """By name: the median, and the factor from which a value is above all that is usual, at least 3.

        The factor is four robust standard deviations (1.4826 median absolute deviations) of the logarithm.
        """
        found = {}
        for name, values in self._values.items():
            if len(values) >= _LEAST:
                logs = torch.tensor(values, dtype=torch.float64).log()
                center = logs.median()
                spread = 1.4826 * (logs - center).abs().median()
                found[name] = float(center.exp()), max(_NOTABLE, math.exp(_DEVIATIONS * float(spread)))
        return found

    def state(self) -> dict[str, Any]:
        """JSON-ready content."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for name, values in state.items():
            self._values[name] = deque((float(value) for value in values), maxlen=self._window)


def excess(value: float, typical: tuple[float, float]) -> float | None:
    """How many times typical a value is; None where that is within what is usual."""
    center, usual = typical
    return value / center if center > 0 and value / center >= usual else None
