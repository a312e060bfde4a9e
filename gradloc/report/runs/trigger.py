# SPDX-License-Identifier: Apache-2.0
"""A run's norms through the trigger's adaptive rule: what it would have flagged, by the very rule that training asks.

A log has one norm for each step, so the rule sees one mini-batch position: the largest norm where the run logged it,
else the mean over the step's mini-batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...core.trigger import AdaptiveThreshold
from ..errors import ReportError
from ..logs.names import is_norm, listed
from ..logs.segments import LoggedRun, surviving
from .metrics import MEAN, Metrics

PREFIX = "actor_rollout_ref.actor.gradloc.trigger."
LEAST = {"window": 8, "warmup": 2, "floor": 1.0, "cap": 1.0}
"""The rule's settings, and the least value of each (floor and cap must be greater)."""


EARLY = 10.0
"""While the rule has no threshold yet, a norm of so many times the median of the others is told all the same."""
_FEWEST = 3
"""Norms that such a median needs."""


@dataclass(frozen=True)
class Judged:
    """One step."""

    step: int
    norm: float
    threshold: float | None
    """None during the warm-up."""
    spike: bool
    typical: float | None = None
    """The level that the norm is held against: the rule's, in the warm-up the median of the norms around it."""
    is_early: bool = False
    """Told in the warm-up, in which the rule itself says nothing."""

    @property
    def ratio(self) -> float | None:
        """The norm in multiples of the threshold."""
        return self.norm / self.threshold if self.threshold else None

    @property
    def times(self) -> float | None:
        """The norm in multiples of what is normal."""
        return self.norm / self.typical if self.typical and math.isfinite(self.norm) else None

    @property
    def is_told(self) -> bool:
        """Whether it is a spike by the rule, or as good as one before the rule speaks."""
        return self.spike or self.is_early


def require_norm(metrics: Metrics, called: str) -> str:
    """The metric that holds the norms.

    Raises:
        ReportError: where there is none, or several fit; names what there is.
    """
    if metrics.norm is not None:
        return metrics.norm
    known = [name for name in metrics.own_names if is_norm(name)]
    there = f"there is {listed(known or metrics.own_names)}."
    why = "has several gradient norms" if known else f"has no gradient norm ({MEAN}, grad_norm or the like)"
    raise ReportError(f"{called} {why}: name one with --metric; {there}")


def settings_of(given: Mapping[str, str]) -> dict[str, float]:
    """``--set`` as the rule takes it.

    Raises:
        ReportError: names the key, what it must be and what was found.
    """
    settings: dict[str, float] = {}
    for key, text in given.items():
        name = key.removeprefix(PREFIX).removeprefix("gradloc.trigger.").removeprefix("trigger.")
        if name not in LEAST:
            raise ReportError(f"--set {key}={text}: there is no such setting; there are {', '.join(LEAST)}.")
        least = LEAST[name]
        try:
            value = type(least)(text)
        except ValueError:
            value = math.nan
        if not (value >= least if isinstance(least, int) else least < value < math.inf):
            kind = f"an integer of at least {least}" if isinstance(least, int) else f"a number greater than {least:g}"
            raise ReportError(f"--set {key}={text}: {name} must be {kind}.")
        settings[name] = value
    try:
        AdaptiveThreshold(**settings)
    except ValueError as error:
        raise ReportError(f"--set: {error}") from None
    return settings


def judge(metrics: Metrics, settings: Mapping[str, float] | None = None) -> list[Judged]:
    """Every step that has a norm, in order."""
    rule = AdaptiveThreshold(**(settings or {}))
    judged = []
    for step, norm in zip(metrics.steps, metrics.get(metrics.norm or MEAN), strict=True):
        if norm is not None:
            threshold, typical = rule.threshold(0), rule.summary(0)["median_norm"]
            judged.append(Judged(step, norm, threshold, rule.observe([norm])[0], typical))
    return _early(judged, rule_window=int((settings or {}).get("window", 64)))


def judge_run(run: LoggedRun, settings: Mapping[str, float] | None = None) -> list[list[Judged]]:
    """The steps of each of a run's segments; one that goes on from another is held against that one's history."""
    return [
        [step for step in judge(surviving(segment), settings) if step.step >= segment.first] for segment in run.segments
    ]


def _early(judged: Sequence[Judged], rule_window: int) -> list[Judged]:
    """Tell apart in the warm-up what is many times the median of all the norms around it."""
    around = sorted(j.norm for j in judged[:rule_window] if 0 < j.norm < math.inf)
    made = list(judged)
    for at, j in enumerate(judged[:rule_window]):
        if j.threshold is None and 0 < j.norm < math.inf and len(around) > _FEWEST:
            others = list(around)
            others.remove(j.norm)
            typical = median(others)
            made[at] = replace(j, typical=typical, is_early=j.norm >= EARLY * typical)
    return made
