# SPDX-License-Identifier: Apache-2.0
"""Tells restarts, resumes and several runs of one log apart, so that a later value never hides an earlier one.

A *segment* is a stretch of a log in which the steps go forwards. A segment that begins within an earlier one goes on
from there: the run was resumed, and what the earlier one logged from that step on was overwritten. A segment that
begins no later than the first is a run of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...words.text import plural
from ..errors import ReportError
from ..runs.metrics import MAX, MEAN, Metrics, build
from .names import canonical, is_norm, listed, norm_of
from .recording import Recording, Row

_BOOKKEEPING = {"epoch", "step", "global_step", "_step", "_runtime", "_timestamp", "time", "timestamp", "iteration"}


@dataclass
class Segment:
    """A stretch of a log in which the steps go forwards."""

    metrics: Metrics
    source: str
    before: "Segment | None" = None
    """The one that it goes on from."""

    @property
    def first(self) -> int:
        return self.metrics.steps[0]

    @property
    def last(self) -> int:
        return self.metrics.steps[-1]

    @property
    def history(self) -> list["Segment"]:
        """The segments that it goes on from, the oldest first, and itself."""
        return [*(self.before.history if self.before else ()), self]


@dataclass
class LoggedRun:
    """One run: a segment, and those that go on from it."""

    name: str
    format: str
    segments: list[Segment]
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> Metrics:
        """What the run came to: every step as it was logged last."""
        return surviving(self.segments[-1])

    @property
    def overwritten(self) -> list[tuple[Segment, list[int]]]:
        """The segments of which a part was logged again, and the steps of that part."""
        kept = {id(part): until for part, until in _parts(self.segments[-1])}
        parts = []
        for segment in self.segments:
            until = kept.get(id(segment), -math.inf)
            lost = [step for step in segment.metrics.steps if step >= until]
            if lost:
                parts.append((segment, lost))
        return parts


def surviving(tip: Segment) -> Metrics:
    """The steps of a segment and of those that it goes on from, each as it was logged last."""
    parts = _parts(tip)
    if len(parts) == 1:
        return tip.metrics
    names = sorted({name for part, _ in parts for name in part.metrics.series})
    steps, series = [], {name: [] for name in names}
    for part, until in parts:
        count = sum(step < until for step in part.metrics.steps)
        steps += part.metrics.steps[:count]
        for name in names:
            series[name] += part.metrics.get(name)[:count]
    called = {name: own for part, _ in parts for name, own in part.metrics.called.items()}
    return Metrics(tip.metrics.source, steps, series, called, tip.metrics.verdicts)


def _parts(tip: Segment) -> list[tuple[Segment, float]]:
    """The segments that a run came to, and the step at which each was left."""
    history = tip.history
    ends = [min((later.first for later in history[at + 1 :]), default=math.inf) for at in range(len(history))]
    return list(zip(history, ends, strict=True))


def runs_of(chains: Iterable[Sequence[Recording]], metric: str | None = None) -> list[LoggedRun]:
    """The runs in what was read.

    Args:
        chains: recordings that may go on from each other, such as the files of one folder, together.
        metric: holds the gradient norms, whatever it is called.

    Raises:
        ReportError: where no run has that metric; names those there are.
    """
    runs: list[LoggedRun] = []
    for chain in chains:
        ordered = sorted(chain, key=lambda recording: recording.rows[0][0])
        runs += _linked(ordered)
    for run in runs:
        _name(run, metric)
    if metric is not None and not any(MEAN in run.segments[0].metrics.series for run in runs):
        there = listed(sorted({name for run in runs for name in run.segments[0].metrics.own_names}))
        raise ReportError(f"{runs[0].name} has no metric {metric}: name one with --metric; there is {there}.")
    return runs


def _linked(chain: Sequence[Recording]) -> list[LoggedRun]:
    """A chain's segments, each put after the one that it goes on from."""
    runs: list[LoggedRun] = []
    for recording in chain:
        parts, notes = split(recording.rows, recording.source)
        for count, part in enumerate(parts):
            segment = Segment(build(part, recording.source), recording.source)
            segment.metrics.verdicts = recording.verdicts
            segment.before = _before(runs[-1].segments[-1], segment) if runs else None
            if segment.before is not None:
                runs[-1].segments.append(segment)
            else:
                again = f", start {count + 1}" if count else ""
                if runs and recording.process and not count:
                    again = f", process {recording.process}"
                runs.append(LoggedRun(recording.name + again, recording.format, [segment]))
            runs[-1].config = runs[-1].config or recording.config
        runs[-1].notes += [*recording.notes, *notes]
    return runs


def _before(last: Segment, segment: Segment) -> Segment | None:
    """The segment that this one goes on from: of those that led to the last one, the latest that began earlier.

    Another file goes on from the last one only where it begins well after that one's beginning and goes further.
    """
    if segment.source != last.source:
        is_later = segment.first - last.first >= max((last.last - last.first) / 10, 2) and segment.last > last.last
        known, new = last.metrics.series.keys(), segment.metrics.series.keys()
        if not is_later or len(known & new) * 2 < min(len(known), len(new)):
            return None
    before: Segment | None = last
    while before is not None and segment.first <= before.first:
        before = before.before
    return before


def split(rows: Sequence[Row], source: str) -> tuple[list[dict[int, dict[str, float]]], list[str]]:
    """Rows in the order written, as stretches in which steps go forwards, and sentences about what was put together."""
    again = sum(a[0] == b[0] and _clash(a[1], b[1]) for a, b in zip(rows, rows[1:], strict=False))
    is_folded = again > max(2, len(rows) // 8)
    parts: list[_Part] = []
    num_same = 0
    for step, values in rows:
        part = parts[-1] if parts else None
        known = part.rows.get(step) if part else None
        if part is None or not part.takes(step, values, is_folded):
            parts.append(_Part())
        elif known is not None and known.items() >= values.items():
            num_same += 1
        parts[-1].put(step, values)
    notes = []
    if is_folded:
        notes.append(
            f"{source} has several rows for a step ({again} of them): of their gradient norms the largest is shown."
        )
    if num_same:
        notes.append(f"{plural(num_same, 'row')} of {source} repeat what the same step had logged.")
    return [part.rows for part in parts], notes


class _Part:
    """A stretch that is being read."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self._last = -math.inf
        self._latest: dict[str, int] = {}

    def takes(self, step: int, values: dict[str, float], is_folded: bool) -> bool:
        if step > self._last:
            return True
        known = self.rows.get(step)
        if known is not None:
            return (is_folded and step == self._last) or not _clash(known, values)
        # a metric that comes late, such as an evaluation's, is no way back
        return all(self._latest.get(name, -math.inf) < step for name in values if not _is_bookkeeping(name))

    def put(self, step: int, values: dict[str, float]) -> None:
        known = self.rows.get(step)
        if known is None:
            self.rows[step] = values
        else:
            for name, value in values.items():
                is_larger = name in known and is_norm(name) and not _worse(value, known[name])
                known[name] = known[name] if is_larger else value
        self._last = max(self._last, step)
        self._latest.update(dict.fromkeys(values, step))


def _clash(known: dict[str, float], values: dict[str, float]) -> bool:
    """Whether two rows say different things of one metric."""
    return any(
        known[name] != value and not (math.isnan(known[name]) and math.isnan(value))
        for name, value in values.items()
        if name in known and not _is_bookkeeping(name)
    )


def _is_bookkeeping(name: str) -> bool:
    return name.rpartition("/")[2] in _BOOKKEEPING or name.startswith("_")


def _worse(value: float, than: float) -> bool:
    return not math.isfinite(value) or (math.isfinite(than) and value > than)


def _name(run: LoggedRun, metric: str | None) -> None:
    """Let the run's metrics go by verl's names, too."""
    names = {name: None for segment in run.segments for name in segment.metrics.series}
    try:
        norm = norm_of(names, metric, run.name)
    except ReportError:
        if metric is not None:  # another run may have it
            for segment in run.segments:
                segment.metrics.series.pop(MEAN, None)
                segment.metrics.series.pop(MAX, None)
            return
        norm = None
    known = canonical(names)
    if norm is not None and (metric is not None or norm not in (MAX, MEAN)):
        known = {**{name: own for name, own in known.items() if name != MEAN}, MEAN: norm}
    for segment in run.segments:
        series = segment.metrics.series
        if metric is not None:
            series.pop(MAX, None)
        for name, own in known.items():
            if own in series:
                series[name] = series[own]
                segment.metrics.called[name] = own
        segment.metrics.called.pop(metric or "", None)
