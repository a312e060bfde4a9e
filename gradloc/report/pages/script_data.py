# SPDX-License-Identifier: Apache-2.0
"""Data for the page's script: the curves point by point, and the list of events."""

import math
from collections.abc import Sequence
from typing import Any

from ...explain.numbers import number
from ...explain.text import one_line, spoken, times
from ..logs.recording import MAX, MEAN, Metrics
from ..runs.comparison import Comparison
from ..runs.diagnosis import Diagnosis
from ..runs.events import EventRow
from ..runs.health import RunHealth
from ..runs.overview import overview
from ..runs.run import RunFolder

POINTS = 4000
"""Most points per curve; of more, each bin keeps its lowest and highest, so that no spike is lost."""
LINKED = 300
"""Most events that the curve marks, the largest ones."""
OTHERS = 6
"""Most other runs of the same log that are drawn."""
SPANS = 120
"""Most parts of the strip of states; each unhealthy one is a tab stop."""
THRESHOLD = "gradloc/threshold"
PANELS = 5
"""Most metrics that are drawn below the norm."""
FAR = 100.0
"""From this multiple of its lowest value on, a metric that is always above 0 is drawn on a log scale."""

Chart = dict[str, Any]
Points = list[tuple[int, float]]


def run_chart(run: RunFolder, health: RunHealth, diagnosis: Diagnosis | None = None) -> Chart | None:
    """Return the chart of norm, threshold and events, with the other main metrics below; None without data.

    Of a run that has only a log, the diagnosis's spikes are marked, with the threshold of the trigger's rule.
    """
    metrics, events = run.metrics, [row for row in run.events.rows if row.model != "critic"]  # its norms are others
    if not metrics and not events:
        return None
    lines = []
    if metrics.get(MAX) != metrics.get(MEAN):
        lines += _line(metrics.known(MAX), "largest of the step", "spike")
    lines += _line(metrics.known(MEAN), "mean of the step" if diagnosis is None else metrics.own_norm, "calm")
    limits = metrics.known(THRESHOLD) or _threshold(metrics, events)
    if diagnosis is not None:
        steps = sum(diagnosis.judged, [])  # of all segments
        limits = limits or sorted({step.step: step.threshold for step in steps if step.threshold is not None}.items())
    lines += _line(limits, "threshold", "limit")
    lines += _others(run)
    marks = _marks(events) if diagnosis is None else _spikes(diagnosis)
    panels = [{"title": "gradient norm", "is_log": True, "lines": lines}] if lines or marks else []
    norms = {metrics.own(name) for name in (MAX, MEAN)}
    others = [
        (course.name, points) for course in overview(metrics) if course.name not in norms and (points := course.known)
    ]
    for name, points in others[:PANELS]:
        low, high = (pick(value for _, value in points) for pick in (min, max))
        panels.append({"title": name, "is_log": high > FAR * low > 0, "lines": _line(points, name, "calm")})
    if not panels:
        return None
    noun = "event" if diagnosis is None else "spike"
    return _chart(panels, metrics.unit) | {"marks": marks, "noun": noun, "bands": health.spans(SPANS)}


def axis_of(unit: str) -> str:
    """Return the label of an axis of steps, by what they count."""
    return "training step" if unit == "step" else unit


def _chart(panels: list[Chart], unit: str) -> Chart:
    return {"panels": panels, "marks": [], "noun": "event", "bands": [], "unit": unit, "axis": axis_of(unit)}


def _spikes(diagnosis: Diagnosis) -> list[list[Any]]:
    """Return the marks of a log's explosions: step, norm, target of the link, note."""
    marks = []
    for explosion in diagnosis.explosions[:LINKED]:
        peak = explosion.peak
        limit = f"threshold {number(peak.threshold, 3)}" if peak.threshold else "no threshold yet"
        marks.append([peak.step, _height(peak.norm), "what-to-do", f"{limit}, {explosion.label}"])
    return marks


def _others(run: RunFolder) -> list[Chart]:
    """Return curves of the norms that a resume overwrote, and of other runs in the same log."""
    if not run.runs or run.events:
        return []
    first, *others = run.runs
    lines = []
    for segment, lost in first.overwritten:
        norms = segment.metrics.known(segment.metrics.norm or MEAN)
        part = [(step, norm) for step, norm in norms if step >= lost[0]]
        lines += _line(part, f"overwritten, from {first.unit} {lost[0]}", "spike")
    for other in others[:OTHERS]:
        metrics = other.metrics
        lines += _line(metrics.known(metrics.norm or MEAN), one_line(other.name, 40), "calm")
    return lines


def comparison_chart(runs: Sequence[RunFolder], comparison: Comparison) -> Chart | None:
    """Return the chart of two runs' gradient norms; None when neither has metrics."""
    lines = []
    for name, run, kind in zip(comparison.names, runs, ("calm", "spike"), strict=True):
        norms = run.metrics.known(MAX) or run.metrics.known(MEAN)
        lines += _line(norms, one_line(name, 60, keep="end"), kind)
    panel = {"title": "gradient norm", "is_log": True, "lines": lines}
    return _chart([panel], comparison.unit) if lines else None


def _line(points: Points, label: str, kind: str) -> list[Chart]:
    """Return a curve as a list of one; empty without points."""
    points = thin(points)
    y = [float(f"{value:.4g}") for _, value in points]
    return [{"label": label, "kind": kind, "x": [step for step, _ in points], "y": y}] if points else []


def thin(points: Points, most: int = POINTS) -> Points:
    """Thin points to at most ``most``; each bin keeps its lowest and highest.

    >>> thin([(1, 0.0), (2, 9.0), (3, 1.0), (4, 1.0)], 2)
    [(1, 0.0), (2, 9.0)]
    """
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: Points = []
    for start in range(0, len(points), size):
        members = points[start : start + size]
        kept += sorted({min(members, key=lambda point: point[1]), max(members, key=lambda point: point[1])})
    return kept


def _threshold(metrics: Metrics, events: list[EventRow]) -> Points:
    """Return the events' thresholds, extended to the run's first and last step."""
    known = {row.step: row.threshold for row in events if row.threshold is not None and math.isfinite(row.threshold)}
    points = sorted(known.items())
    if not points:
        return []
    (first, low), (last, high) = points[0], points[-1]
    return [(min([first, *metrics.steps[:1]]), low), *points, (max([last, *metrics.steps[-1:]]), high)]


def _marks(events: list[EventRow]) -> list[list[Any]]:
    """Return the marks of the largest events: step, norm, target of the link, note."""
    placed = [(row.norm, row) for row in events if row.norm is not None]
    placed.sort(key=lambda entry: entry[0] if math.isfinite(entry[0]) else math.inf, reverse=True)
    return [[row.step, _height(norm), f"event-{row.event_id}", "select to open"] for norm, row in placed[:LINKED]]


def _height(norm: float) -> float | None:
    """Round a norm; None where it is not finite."""
    return float(f"{norm:.4g}") if math.isfinite(norm) else None


def row(event: EventRow) -> dict[str, Any]:
    """Return an event's row of the list."""
    excess = times(event.norm, event.threshold)
    return {
        "id": event.event_id,
        "step": f"{event.step}.{event.mini_batch}" if event.mini_batch else f"{event.step}",
        "norm": number(event.norm),
        "size": _sortable(event.norm),
        "threshold": number(event.threshold, 3),
        "excess": number(event.norm) if excess is None else f"{number(excess, 3)}×",
        "times": _sortable(event.norm if excess is None else excess),
        "count": event.num_culprits,
        "token": one_line(event.token, 24),
        "fault": spoken(event.fault),
        "cause": spoken(event.cause) or "–",
        "verdict": spoken(event.verdict),
        "action": event.action,
        "words": event.words,
    }


def _sortable(value: float | None) -> float | str:
    """Return a number that JSON can hold and the page's script can sort by; -1 where it is not known."""
    if value is None:
        return -1
    return float(f"{value:.6g}") if math.isfinite(value) else "Infinity"
