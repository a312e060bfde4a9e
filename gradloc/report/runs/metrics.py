# SPDX-License-Identifier: Apache-2.0
"""A run's metrics: one list of steps and, per metric, one value per step (None where the step has none)."""

import math
from dataclasses import dataclass, field

MEAN = "actor/grad_norm"
MAX = "actor/grad_norm_max"


@dataclass
class Metrics:
    """Metrics over steps, ascending."""

    source: str = ""
    """The file's or folder's name."""
    steps: list[int] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    """verl's name -> the log's own, for metrics that go by both."""
    verdicts: list[str] = field(default_factory=list)
    """GradLoc's sentences about its events."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def get(self, name: str) -> list[float | None]:
        """The values of one metric, one per step; all None when there is no such metric."""
        return self.series.get(name) or [None] * len(self.steps)

    def logged(self, name: str) -> list[tuple[int, float]]:
        """The steps that have one metric, and its values."""
        pairs = zip(self.steps, self.get(name), strict=True)
        return [(step, value) for step, value in pairs if value is not None]

    def known(self, name: str) -> list[tuple[int, float]]:
        """The steps and values at which one metric is finite, in order."""
        return [(step, value) for step, value in self.logged(name) if math.isfinite(value)]

    def finite(self, name: str) -> list[float]:
        """The finite values of one metric, in order."""
        return [value for _, value in self.known(name)]

    @property
    def norm(self) -> str | None:
        """The metric that holds the gradient norms: the step's largest where that was logged; None without norms."""
        return next((name for name in (MAX, MEAN) if any(v is not None for v in self.series.get(name, ()))), None)

    @property
    def own_norm(self) -> str:
        """The same as the log itself calls it."""
        return self.called.get(self.norm or "", self.norm or "norm")

    @property
    def norms(self) -> list[float]:
        return self.finite(self.norm or "")

    @property
    def own_names(self) -> list[str]:
        """The metrics as the log itself calls them."""
        return [name for name in self.series if name not in self.called]


def build(rows: dict[int, dict[str, float]], source: str) -> Metrics:
    """Turns ``{step: {name: value}}`` into columns."""
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row})
    return Metrics(source, steps, {name: [rows[step].get(name) for step in steps] for name in names})
