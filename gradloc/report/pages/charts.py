# SPDX-License-Identifier: Apache-2.0
"""The curves as the page's script draws them: what is on them, point by point."""

import math
from collections.abc import Sequence
from typing import Any

from ...record import Event
from ...words.text import one_line
from ..runs.comparison import Comparison
from ..runs.health import RunHealth
from ..runs.metrics import MAX, MEAN, Metrics
from ..runs.run import RunFolder

POINTS = 4000
"""Points per curve; of more, the lowest and highest of each bin are kept, so that no spike is lost."""
LINKED = 300
"""Events that the curve marks; the largest ones."""
OTHERS = 6
"""Other runs of the same log that are drawn."""
SPANS = 120
"""Parts that the strip of states has at most; each that is not healthy can be tabbed to."""
THRESHOLD = "gradloc/threshold"
BELOW = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
}
"""Panels under the norm, and the metrics that can fill each: the first that the run has and that is not always 0."""

Chart = dict[str, Any]


def run_chart(run: RunFolder, health: RunHealth) -> Chart | None:
    """Gradient norm, threshold and events, with reward, entropy and KL below; None when there is nothing to draw."""
    metrics, events = run.metrics, [event for event in run.events if event.model != "critic"]  # its norms are others
    if not metrics and not events:
        return None
    lines = []
    if metrics.finite(MAX) and metrics.get(MAX) != metrics.get(MEAN):
        lines.append(_line(metrics, MAX, "largest of the step", "spike"))
    lines.append(_line(metrics, MEAN, "mean of the step", "calm"))
    lines.append(_threshold(metrics, events))
    lines += _others(run)
    panels = [{"title": "gradient norm", "is_log": True, "lines": [line for line in lines if line]}]
    for title, names in BELOW.items():
        name = next((name for name in names if any(metrics.finite(name))), None)
        if name is not None:
            panels.append({"title": title, "is_log": False, "lines": [_line(metrics, name, name, "calm")]})
    spans = health.spans(SPANS) if health else []
    return {
        "panels": panels,
        "marks": _marks(events),
        "bands": [[s.first, s.last, s.state, s.note if s.reasons else ""] for s in spans],
    }


def _others(run: RunFolder) -> list[Chart | None]:
    """The norms that the run's own hide: what a resume overwrote, and other runs of the same log."""
    if not run.log or run.events:
        return []
    first, *others = run.log.runs
    lines = []
    for segment, lost in first.overwritten:
        at = segment.metrics.steps.index(lost[0])
        part = Metrics(steps=lost, series={MEAN: segment.metrics.get(segment.metrics.norm or MEAN)[at:]})
        lines.append(_line(part, MEAN, f"overwritten, from step {lost[0]}", "spike"))
    for other in others[:OTHERS]:
        lines.append(_line(other.metrics, other.metrics.norm or MEAN, one_line(other.name, 40), "calm"))
    return lines


def comparison_chart(runs: Sequence[RunFolder], found: Comparison) -> Chart | None:
    """The gradient norms of two runs in one picture; None when neither has metrics."""
    lines = []
    for name, run, kind in zip(found.names, runs, ("calm", "spike"), strict=True):
        metric = MAX if run.metrics.finite(MAX) else MEAN
        lines.append(_line(run.metrics, metric, one_line(name, 60, keep="end"), kind))
    panel = {"title": "gradient norm", "is_log": True, "lines": [line for line in lines if line]}
    return {"panels": [panel], "marks": [], "bands": []} if panel["lines"] else None


def _line(metrics: Metrics, name: str, label: str, kind: str) -> Chart | None:
    known = metrics.known(name)
    if not known:
        return None
    steps, found = thin([step for step, _ in known], [value for _, value in known])
    return {"label": label, "kind": kind, "x": steps, "y": [float(f"{value:.4g}") for value in found]}


def thin(steps: list[int], found: list[float], points: int = POINTS) -> tuple[list[int], list[float]]:
    """At most so many points; the lowest and highest of each bin stay.

    >>> thin([1, 2, 3, 4], [0.0, 9.0, 1.0, 1.0], 2)
    ([1, 2], [0.0, 9.0])
    """
    if len(steps) <= points:
        return steps, found
    size = math.ceil(2 * len(steps) / points)
    keep: list[int] = []
    for start in range(0, len(steps), size):
        members = range(start, min(start + size, len(steps)))
        keep += sorted({min(members, key=found.__getitem__), max(members, key=found.__getitem__)})
    return [steps[i] for i in keep], [found[i] for i in keep]


def _threshold(metrics: Metrics, events: list[Event]) -> Chart | None:
    """The threshold at every step where the run logged it, else as far as the events know it."""
    logged = _line(metrics, THRESHOLD, "threshold", "limit")
    if logged:
        return logged
    known = {e.step.global_step: e.trigger.threshold for e in events if e.trigger.threshold is not None}
    known = {step: value for step, value in known.items() if math.isfinite(value)}
    if not known:
        return None
    steps = sorted(known)
    ends = (min([steps[0], *metrics.steps[:1]]), max([steps[-1], *metrics.steps[-1:]]))
    x = [ends[0], *steps, ends[1]]
    y = [known[steps[0]], *(known[step] for step in steps), known[steps[-1]]]
    return {"label": "threshold", "kind": "limit", "x": x, "y": [float(f"{value:.4g}") for value in y]}


def _marks(events: list[Event]) -> list[list[Any]]:
    """Step, norm (null: not finite) and name of the events, the largest ones."""
    placed = [
        (norm if math.isfinite(norm) else math.inf, event)
        for event in events
        if (norm := event.trigger.grad_norm) is not None
    ]
    placed.sort(key=lambda entry: entry[0], reverse=True)
    return [
        [event.step.global_step, float(f"{norm:.4g}") if norm < math.inf else None, event.event_id]
        for norm, event in placed[:LINKED]
    ]
