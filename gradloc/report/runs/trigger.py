# SPDX-License-Identifier: Apache-2.0
"""A run's norms through the trigger's adaptive rule: what it would have flagged, by the very rule that training asks.

A log has one norm for each step, so the rule sees one mini-batch position: the largest norm where the run logged it,
else the mean over the step's mini-batches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.adaptive import AdaptiveThreshold
from ..errors import ReportError
from .metrics import MAX, MEAN, Metrics

PREFIX = "actor_rollout_ref.actor.gradloc.trigger."
LEAST = {"window": 8, "warmup": 2, "floor": 1.0, "cap": 1.0}
"""The rule's settings, and the least value of each (floor and cap must be greater)."""


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
