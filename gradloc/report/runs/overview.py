# SPDX-License-Identifier: Apache-2.0
"""Sums up what a run's main metrics did: a row of numbers for each, whatever the rules find in it."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from ...explain.numbers import number
from ...health.rules import ENTROPY, REFERENCE_KL, SCORES
from ..logs.names import is_gan_loss, is_training_loss
from ..logs.pairs import NO_METRIC
from ..logs.recording import Metrics
from .health import LOSSES

MOST = 8
"""Most metrics that are summed up."""
HEAD = ("metric", "rows", "first", "lowest", "at", "highest", "at", "last", "course")
_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_SIGNALS = (SCORES, ENTROPY, (*REFERENCE_KL, "actor/ppo_kl"))
_EVALUATED = re.compile(r"(?<![a-z])(?:eval|val|valid|validation|test|acc|accuracy)(?![a-z])")
LOSS_SCALE = re.compile(r"loss[ _.]?scale$", re.IGNORECASE)
"""In the name of the loss scale of fp16."""
RATE = re.compile(r"(?<![a-z])(?:lr|learning[ _]?rate)(?![a-z])", re.IGNORECASE)
"""In the name of a learning rate."""
_BOOKKEEPING = re.compile(
    rf"{NO_METRIC.pattern}|epoch|step|iter|batch|v?_?num|samples|weight|scale|(?<![a-z])episodes?$", re.IGNORECASE
)


@dataclass(frozen=True)
class Course:
    """What one metric did over a run."""

    name: str
    """The log's own name."""
    values: list[tuple[int, float]]
    """Steps and values, in order."""

    @property
    def known(self) -> list[tuple[int, float]]:
        """The finite values, with their steps."""
        return [(step, value) for step, value in self.values if math.isfinite(value)]

    def facts(self) -> dict[str, Any]:
        """Return its number of rows, first, lowest, highest and last value, with the extremes' steps."""
        known = self.known
        made: dict[str, Any] = {"name": self.name, "rows": len(self.values)}
        made |= {"not_finite": len(self.values) - len(known), "first": self.values[0][1]}
        for name, pick in (("lowest", min), ("highest", max)):
            made[f"{name}_at"], made[name] = pick(known, key=itemgetter(1), default=(None, None))
        return made | {"last": self.values[-1][1]}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The row that shows it under :data:`HEAD`, apart from its course."""
        facts = self.facts()
        rows = number(facts["rows"]) + (f", {number(facts['not_finite'])} NaN/∞" if facts["not_finite"] else "")
        names = ("first", "lowest", "lowest_at", "highest", "highest_at", "last")
        return self.name, rows, *(_short(facts[name]) for name in names)

    def bars(self, width: int) -> str:
        """Draw the medians of at most ``width`` equal parts, from the lowest to the highest; × for a part with a value
        that is not finite.

        Their logarithms are drawn where they are all above 0 and more than fourfold apart.

        >>> Course("loss", [(step, value) for step, value in enumerate((4.0, 3.0, 2.0, math.nan, 1.0))]).bars(8)
        '█▆▃×▁'
        """
        count = min(width, len(self.values))
        ends = [len(self.values) * part // count for part in range(count + 1)]
        parts = [[value for _, value in self.values[ends[part] : ends[part + 1]]] for part in range(count)]
        levels = [median(part) if all(map(math.isfinite, part)) else None for part in parts]
        known = [level for level in levels if level is not None]
        if known and min(known) > 0 and max(known) > 4 * min(known):
            levels = [level and math.log(level) for level in levels]
            known = [math.log(level) for level in known]
        low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
        top = len(_BARS) - 1
        return "".join(
            _NOT_FINITE if level is None else _BARS[round(top * (level - low) / span) if span else top // 2]
            for level in levels
        )


def overview(metrics: Metrics) -> list[Course]:
    """Return the courses of a run's gradient norm, reward, entropy, KL, losses and accuracy, in this order.

    At most :data:`MOST` that have two values or more; one that is always 0 is left out, unless it is the main loss.
    Where a run has none of these, any metrics are returned.
    """
    own = metrics.own_names
    first = [metrics.norm or "", *(_first_used(metrics, names) for names in _SIGNALS), metrics.first(LOSSES)]
    wanted = [metrics.own(name) for name in first]
    wanted += [name for name in own if is_training_loss(name) and any(metrics.get(name))]
    wanted += filter(is_gan_loss, own if is_gan_loss(metrics.own(first[-1])) else ())
    others = [name for name in own if not _BOOKKEEPING.search(name)]
    wanted += [name for name in others if _EVALUATED.search(name.lower())]
    if not any(first[1:]):  # the loop has names of its own
        wanted += [name for name in others if len({*metrics.get(name)}) > 2]
    settings = (name for name in own if LOSS_SCALE.search(name) or RATE.search(name))
    wanted += [name for name in settings if len({*metrics.get(name)}) > 1]
    return _courses(metrics, wanted)


def _courses(metrics: Metrics, names: Iterable[str]) -> list[Course]:
    logged = ((name, metrics.logged(name)) for name in dict.fromkeys(names))
    return [Course(name, values) for name, values in logged if len(values) > 1][:MOST]


def _first_used(metrics: Metrics, names: tuple[str, ...]) -> str:
    return metrics.first(name for name in names if any(value for _, value in metrics.logged(name)))


def _short(value: float | None) -> str:
    """Format a number with three digits in at most nine characters.

    >>> _short(344_671_968.0), _short(13_780), _short(0.00667), _short(None)
    ('3.45e8', '13,780', '0.00667', '–')
    """
    if isinstance(value, float) and 1e6 <= abs(value) < 1e9:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return number(value, 3)
