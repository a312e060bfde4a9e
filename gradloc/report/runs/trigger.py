# SPDX-License-Identifier: Apache-2.0
"""A run's norms through the trigger's adaptive rule: what it would have flagged, by the very rule that training asks.

A log has one norm for each step, so the rule sees one mini-batch position: the largest norm where the run logged it,
else the mean over the step's mini-batches.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.adaptive import AdaptiveThreshold
from ...words.numbers import number
from ..errors import ReportError
from .metrics import MAX, MEAN, Metrics

PREFIX = "actor_rollout_ref.actor.gradloc.trigger."
LEAST = {"window": 8, "warmup": 2, "floor": 1.0, "cap": 1.0}
"""The rule's settings, and the least value of each (floor and cap must be greater)."""


LOUD = 10.0
"""Times the run's median that a norm is said to be large, with or without an event."""
NO_EVENT = "No event tells which tokens: the trigger was warming up, or GradLoc was off."


@dataclass(frozen=True)
class Judged:
    """One step."""

    step: int
    norm: float
    threshold: float | None
    """None during the warm-up."""
    spike: bool

    @property
    def ratio(self) -> float | None:
        """The norm in multiples of the threshold."""
        return self.norm / self.threshold if self.threshold else None


def norm_of(metrics: Metrics, name: str | None = None) -> str:
    """The metric that holds the norms: the one named, else the actor's, else the only one there is.

    Raises:
        ReportError: names what there is.
    """
    known = [metric for metric in metrics.series if metric.endswith(("grad_norm", "grad_norm_max"))]
    wanted = [name] if name else [MAX, MEAN, *(known if len(known) == 1 else ())]
    found = next((metric for metric in wanted if metrics.finite(metric)), None)
    if found is None:
        there = ", ".join(known) or "none that ends in grad_norm"
        raise ReportError(f"{metrics.source} has no metric {name or MEAN}: name one with --metric; there is {there}.")
    return found


def loudest(metrics: Metrics) -> tuple[int, float, float] | None:
    """The step of the largest norm, the norm, and how many times the run's median it is; None under ten times.

    Whatever the trigger would say: it says nothing while it warms up. A norm that is not finite is the largest.
    """
    try:
        name = norm_of(metrics)
    except ReportError:
        return None
    norms = [(step, value) for step, value in zip(metrics.steps, metrics.get(name), strict=True) if value is not None]
    step, norm = max(norms, key=lambda pair: pair[1] if math.isfinite(pair[1]) else math.inf)
    times = norm / (statistics.median(metrics.finite(name)) or math.inf)
    return (step, norm, times) if not times < LOUD else None


def loudest_sentence(metrics: Metrics) -> str:
    """The same in words; empty where no norm is that large."""
    found = loudest(metrics)
    if found is None:
        return ""
    step, norm, times = found
    over = f", {number(times, 3)} times the run's median" if math.isfinite(times) else ""
    return f"Step {step}: gradient norm {number(norm, 3)}{over}"


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


def judge(metrics: Metrics, name: str, settings: Mapping[str, float] | None = None) -> list[Judged]:
    """Every step that has a norm, in order."""
    rule = AdaptiveThreshold(**(settings or {}))
    judged = []
    for step, norm in zip(metrics.steps, metrics.get(name), strict=True):
        if norm is not None:
            threshold = rule.threshold(0)
            judged.append(Judged(step, norm, threshold, rule.observe([norm])[0]))
    return judged
