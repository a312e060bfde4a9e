# SPDX-License-Identifier: Apache-2.0
"""A run's norms through the trigger's adaptive rule: what it would have flagged, by the very rule that training asks.

A log has one norm for each step, so the rule sees one mini-batch position: the largest norm where the run logged it,
else the mean over the step's mini-batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...checks import integer, number, refuse_unknown
from ...core.trigger import AdaptiveThreshold
from ..errors import ReportError, assignments
from ..logs.names import is_norm, listed
from ..logs.recording import MEAN, Metrics
from ..logs.segments import LoggedRun, surviving

_OVER_ONE = number("a number greater than 1", lambda value: 1 < value < math.inf)
SETTINGS = {"window": integer(8), "warmup": integer(2), "floor": _OVER_ONE, "cap": _OVER_ONE}
"""The rule's settings, and what each may be."""
EARLY = 10.0
"""While the rule has no threshold yet, a norm of so many times the median of the others counts as a spike."""


@dataclass(frozen=True)
class Judged:
    step: int
    norm: float
    threshold: float | None
    """None during the warm-up."""
    spike: bool
    typical: float | None = None
    """What is normal: the rule's level; during the warm-up the median of the norms before it."""
    is_early: bool = False
    """As good as a spike, during the warm-up, when the rule itself says nothing."""

    @property
    def ratio(self) -> float | None:
        return self.norm / self.threshold if self.threshold else None

    @property
    def times(self) -> float | None:
        """The norm in multiples of what is normal."""
        return self.norm / self.typical if self.typical and math.isfinite(self.norm) else None

    @property
    def stands_out(self) -> bool:
        return self.spike or self.is_early


def missing_norm(metrics: Metrics, name: str) -> str:
    """That a run has no gradient norm, or several fit, and what there is; empty where it has one."""
    if metrics.norm is not None:
        return ""
    known = [own for own in metrics.own_names if is_norm(own)]
    why = "has several gradient norms" if known else f"has no gradient norm ({MEAN}, grad_norm or the like)"
    return f"{name} {why}: name one with --metric; there is {listed(known or metrics.own_names)}."


def settings_of(given: Sequence[str]) -> dict[str, float]:
    """What ``--set KEY=VALUE`` sets; raises ReportError with the key, what it must be and what was found."""
    settings = assignments(given, "trigger.", "a number, such as --set cap=6")
    try:
        refuse_unknown("trigger", settings, SETTINGS)
        for name, value in settings.items():
            SETTINGS[name].check(name, value)
        AdaptiveThreshold(**settings)
    except ValueError as error:
        raise ReportError(f"--set: {error}") from None
    return settings


def judge(metrics: Metrics, settings: Mapping[str, float] | None = None) -> list[Judged]:
    """Every step that has a norm, in order."""
    rule = AdaptiveThreshold(**(settings or {}))
    judged = []
    for step, norm in metrics.logged(metrics.norm or MEAN):
        threshold, typical = rule.threshold(0), rule.summary(0).median_norm
        judged.append(Judged(step, norm, threshold, rule.observe([norm])[0], typical))
    return _judge_warmup(judged, window=int((settings or {}).get("window", 64)))


def judge_run(run: LoggedRun, settings: Mapping[str, float] | None = None) -> list[list[Judged]]:
    """The steps of each of a run's segments; one that goes on from another is held against that one's history."""
    return [
        [step for step in judge(surviving(segment), settings) if step.step >= segment.first] for segment in run.segments
    ]


def _judge_warmup(judged: list[Judged], window: int) -> list[Judged]:
    """The same steps; those of the warm-up held against the norms before them, the first three against the others.

    What comes after a spike may be its work, so it is no measure of what is normal. A norm that only goes on from a
    rise is none: it has to be three times the largest before it.
    """
    norms = sorted(j.norm for j in judged[:window] if 0 < j.norm < math.inf)
    before: list[float] = []
    for at, j in enumerate(judged[:window]):
        if j.threshold is None and 0 < j.norm < math.inf and len(norms) > 3:  # fewer say nothing
            others = list(norms)
            others.remove(j.norm)
            typical = median(before if len(before) >= 3 else others)
            is_jump = len(before) < 3 or j.norm >= 3 * max(before)
            judged[at] = replace(j, typical=typical, is_early=is_jump and j.norm >= EARLY * typical)
        if 0 < j.norm < math.inf and not judged[at].is_early:
            before.append(j.norm)
    return judged
