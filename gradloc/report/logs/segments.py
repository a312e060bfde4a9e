# SPDX-License-Identifier: Apache-2.0
"""Separates restarts, resumes and several runs of one log, so that a later value never hides an earlier one.

A *segment* is a stretch of a log in which the steps go forwards. A segment that begins within an earlier one goes on
from there: the run was resumed, and what the earlier one logged from that step on was overwritten. A segment that
begins no later than the first is a run of its own.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any

from ...explain.advice import in_verls_names
from ...explain.text import plural
from ...record.files import NAME
from ..errors import ReportError, did_you_mean
from .names import canonical, is_norm, is_training_loss, listed, norm_of
from .recording import MAX, MEAN, OF_WATCH, READ_IN_ORDER, Metrics, Recording, Row, build

_BOOKKEEPING = {"epoch", "step", "global_step", "_step", "_runtime", "_timestamp", "time", "timestamp", "iteration"}

_COUNTS = ("iter", "iteration", "micro_step", "batch", "epoch")
"""Metrics that may count rows where several have one step."""
MANY = 10_000
"""Rows by which a log's own metrics are known."""
STARTS = 50
"""How often a run may be resumed; beyond it is another run."""
_LENGTHS = ("response_length/max", "response_length/mean", "completions/max_length", "train/completions/max_length")
_OF_TRAINER = {"grad_norm", "learning_rate", "epoch", "loss"}
"""Names that every Trainer of Transformers logs."""


@dataclass
class Segment:
    """A stretch of a log in which the steps go forwards."""

    metrics: Metrics
    before: "Segment | None" = None
    """The one that it goes on from."""

    @property
    def first(self) -> int:
        return self.metrics.steps[0]

    @property
    def last(self) -> int:
        return self.metrics.steps[-1]


@dataclass
class LoggedRun(Recording):
    """One run: a segment, and those that go on from it; without the rows, which the segments have."""

    name: str = ""
    segments: list[Segment] = field(default_factory=list)

    @property
    def trainer(self) -> str:
        """``verl``, ``trl`` (any Trainer of Transformers), or ``other``, by what wrote the log and by its names."""
        if self.format == OF_WATCH:
            return "other"
        names = set(self.parts[-1].own_names)
        is_named = any(name.startswith(("actor/", "trainer.")) for name in [*names, *self.config])
        if is_named or self.format.startswith("verl"):
            return "verl"
        is_printed = self.format == "a Trainer's printed dicts" and "grad_norm" in names
        is_state = self.format == "trainer_state.json"
        has_names = _OF_TRAINER <= {name.removeprefix("train/") for name in names}
        return "trl" if is_printed or is_state or has_names else "other"

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings by verl's names, as far as the log says them; the longest response serves as the limit."""
        known = in_verls_names(self.config, self.trainer)
        metrics = self.metrics
        lengths = [max(metrics.finite(name), default=0.0) for name in _LENGTHS]
        if "data.max_response_length" not in known and any(lengths):
            known["data.max_response_length"] = max(lengths)
        return known

    @property
    def parts(self) -> list[Metrics]:
        return [segment.metrics for segment in self.segments]

    @property
    def peak(self) -> float:
        """The largest norm over the median, overwritten ones as well; inf where norms are logged and none is finite."""
        norms = [norm for part in self.parts for norm in part.norms]
        if not norms:
            return math.inf if any(part.logged(part.norm or "") for part in self.parts) else 0.0
        return max(norms) / (median(norms) or 1.0)

    @property
    def metrics(self) -> Metrics:
        """The run's metrics, every step as it was logged last."""
        return surviving(self.segments[-1])

    @property
    def overwritten(self) -> list[tuple[Segment, list[int]]]:
        """The segments with a part that was logged again, and the steps of that part."""
        kept = {id(segment): until for segment, until in _history(self.segments[-1])}
        parts = [
            (segment, [step for step in segment.metrics.steps if step >= kept.get(id(segment), -math.inf)])
            for segment in self.segments
        ]
        return [(segment, lost) for segment, lost in parts if lost]


def surviving(tip: Segment) -> Metrics:
    """Return the steps of a segment and of those that it goes on from, each as it was logged last."""
    history = _history(tip)
    if len(history) == 1:
        return tip.metrics
    made = Metrics(tip.metrics.source, verdicts=tip.metrics.verdicts, unit=tip.metrics.unit)
    names = sorted({name for part, _ in history for name in part.metrics.series})
    series: dict[str, list[float | None]] = {name: [] for name in names}
    for part, until in history:
        count = sum(step < until for step in part.metrics.steps)
        made.steps += part.metrics.steps[:count]
        made.called.update(part.metrics.called)
        for name, values in series.items():
            values += part.metrics.get(name)[:count]
    made.series = {**series}
    return made


def _history(tip: Segment) -> list[tuple[Segment, float]]:
    """Return the segments that a run came from, the oldest first, and the step at which each was left."""
    parts: list[tuple[Segment, float]] = []
    segment, until = tip, math.inf
    while segment is not None:
        parts.append((segment, until))
        segment, until = segment.before, min(until, segment.first)
    return parts[::-1]


def runs_of(chains: Iterable[Sequence[Recording]], metric: str | None = None) -> list[LoggedRun]:
    """Return the runs in what was read; raises ReportError where ``metric`` is given and no run has it.

    A chain holds recordings that may go on from each other, such as the files of one folder.
    """
    runs: list[LoggedRun] = []
    for chain in chains:
        runs += _linked(sorted(chain, key=lambda recording: recording.rows[0][0]))
    own = {name for run in runs for name in run.parts[0].own_names}
    if metric in own and is_training_loss(metric):
        raise ReportError(f"{metric} is a loss, and --metric names the gradient norm: leave it out, losses are judged.")
    for run in runs:
        _use_known_names(run, metric)
    if metric is not None and not any(MEAN in part.series for run in runs for part in run.parts):
        guess = did_you_mean(metric, own) or f": name one with --metric; there is {listed(sorted(own))}."
        raise ReportError(f"{runs[0].name} has no metric {metric}{guess}")
    return runs


def _linked(chain: Sequence[Recording]) -> list[LoggedRun]:
    """Return a chain's segments, each put after the one that it goes on from."""
    runs: list[LoggedRun] = []
    for recording in chain:
        _count_by_row(recording)
        _number_through_epochs(recording)
        if _are_mixed([step for step, _ in recording.rows]):
            recording.rows.sort(key=lambda row: row[0])
            recording.notes.append(f"The rows of {recording.source} were not in the order of their steps.")
        parts: list[dict[int, dict[str, float]]] = []
        notes: list[str] = []
        for rows in _apart(recording):
            more, said = split(rows, recording.source)
            parts += more
            notes += said
        recording.rows.clear()
        for count, rows in enumerate(parts):
            segment = Segment(build(rows, recording.source))
            segment.metrics.verdicts, segment.metrics.unit = recording.verdicts, recording.unit
            may_follow = bool(runs) and len(runs[-1].segments) < STARTS  # each is judged with what led to it
            segment.before = _before(runs[-1].segments[-1], segment) if may_follow else None
            if segment.before is not None:
                runs[-1].segments.append(segment)
            else:
                name = f"{recording.source}, {recording.run[:NAME]}" if recording.run else recording.source
                if count:
                    name += f", start {count + 1}"
                elif runs and recording.process:
                    name += f", process {recording.process}"
                run = LoggedRun(recording.source, recording.format, name=name, segments=[segment], unit=recording.unit)
                run.folder, run.receipt = recording.folder, recording.receipt
                runs.append(run)
            runs[-1].config = runs[-1].config or recording.config
            runs[-1].skips += recording.skips if not count else []
            runs[-1].saved |= recording.saved
        runs[-1].notes += [*recording.notes, *notes]
    return runs


def _apart(recording: Recording) -> list[list[Row]]:
    """Return the rows; of rows named by their place, those of each training, which begins with row 1 again."""
    starts = [at for at, (before, after) in enumerate(pairwise(recording.rows), 1) if after[0] < before[0]]
    ends = [*starts, len(recording.rows)] if recording.unit == "row" else [len(recording.rows)]
    return [recording.rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _count_by_row(recording: Recording) -> None:
    """Take the metric that counts each row, such as ``iter``, for the step where the step is that of many rows."""
    rows = recording.rows
    num_again = sum(before[0] == after[0] for before, after in pairwise(rows))
    for name in _COUNTS if 2 * num_again > len(rows) > 2 else ():
        counts = [values.get(name, math.nan) for _, values in rows]
        if all(before < after for before, after in pairwise(counts)):
            recording.rows = [(int(count), values) for count, (_, values) in zip(counts, rows, strict=True)]
            recording.unit = {"epoch": "epoch", "batch": "batch", "micro_step": "batch"}.get(name, "step")
            return


def _are_mixed(steps: Sequence[int]) -> bool:
    """Return whether steps are out of order: once each, or as often each and near each other, as ranks print them. No
    resume leaves them so.
    """
    back = [before - after for before, after in pairwise(steps) if after < before]
    counts = Counter(steps)
    is_once = len(counts) == len(steps)
    are_near = max(back, default=0) < len(counts) / 4
    often, num_often = Counter(counts.values()).most_common(1)[0] if counts else (1, 0)
    are_two = often > 1 and 4 * num_often > 3 * len(counts) and 10 * len(back) > len(steps)  # writers of one file
    return len(back) > 3 and (is_once or are_near and num_often == len(counts) or are_two)


def _number_through_epochs(recording: Recording) -> None:
    """Name rows by their places where the step begins anew in each epoch, and keep it as a metric."""
    rows = recording.rows
    pairs = {(step, values["epoch"]) for step, values in rows if values.get("epoch", 0.5).is_integer()}
    are_of_epochs = len({step for step, _ in pairs}) < len(pairs)
    has_norms = any(any(map(is_norm, values)) for _, values in rows)
    last, its_epoch, place, count = -1, math.nan, None, 0
    numbers: list[int] = []
    num_in_epoch, is_begun = 0, False
    for step, values in rows if recording.unit == "step" else ():
        epoch = next((value for name, value in values.items() if name.lower() == "epoch"), its_epoch)
        count += (step, epoch) != place and not all(map(_is_evaluations, values))
        numbers.append(count)
        place = step, epoch
        if has_norms and not any(map(is_norm, values)):
            continue
        is_later = epoch > its_epoch and epoch.is_integer()
        if step < last or step == last and is_later:
            is_next = is_later and (step <= last / 2 or num_in_epoch == 1)
            is_again = epoch < its_epoch  # a run that was begun again
            if not (is_next or is_again or are_of_epochs):
                return
            num_in_epoch, is_begun = 0, is_begun or not is_again
        num_in_epoch += 1
        last, its_epoch = step, epoch
    if is_begun:
        recording.rows = [
            (at, values | {"step": float(step)}) for at, (step, values) in zip(numbers, rows, strict=True)
        ]
        recording.unit = "row"
        recording.skips = [
            replace(skip, step=numbers[skip.row] if skip.row in range(len(numbers)) else None)
            for skip in recording.skips
        ]
        recording.notes.append(f"The steps in {recording.source} start again in each epoch, so its {READ_IN_ORDER}")


def _before(last: Segment, segment: Segment) -> Segment | None:
    """Return the segment that this one goes on from: of those that led to the last one, the latest that began earlier.

    Another file goes on from the last one only where it begins well after that one's beginning and goes further.
    """
    if segment.metrics.unit != last.metrics.unit:
        return None
    if segment.metrics.source != last.metrics.source:
        is_later = segment.first - last.first >= max((last.last - last.first) / 10, 2) and segment.last > last.last
        known, new = last.metrics.series.keys(), segment.metrics.series.keys()
        if not is_later or len(known & new) * 2 < min(len(known), len(new)):
            return None
    before: Segment | None = last
    while before is not None and segment.first <= max(before.first, 1):  # its step 0 may be cut off
        before = before.before
    return before


def split(rows: Sequence[Row], source: str) -> tuple[list[dict[int, dict[str, float]]], list[str]]:
    """Return rows in the order written, as stretches in which steps go forwards, and sentences about what was put
    together.
    """
    num_norms = sum(any(map(is_norm, values)) for _, values in rows)
    counts = Counter(name for _, values in rows[:MANY] for name in values)
    own = {name: count for name, count in counts.items() if not is_bookkeeping(name)}
    most = max(own.values(), default=0)
    main = {name for name, count in own.items() if 2 * count > most}
    losses = {name for name in main if is_training_loss(name)}

    def is_beside(values: dict[str, float]) -> bool:
        """Return whether a row is none of training's own, such as an evaluation's: without the norm, or with less than
        half of the metrics that most rows have. It may call its loss as training does.
        """
        if losses and not losses & values.keys() and any(map(_EVALUATION.match, values)):
            return True
        return 2 * num_norms > len(rows) and not any(map(is_norm, values)) or 2 * len(main & values.keys()) < len(main)

    again = sum(
        a[0] == b[0] and _clash(a[1], b[1]) and not is_beside(a[1]) and not is_beside(b[1]) for a, b in pairwise(rows)
    )
    is_folded = again > max(2, len(rows) // 8)
    parts: list[_Stretch] = []
    num_same, notes = 0, []
    strays = [at for at in range(1, len(rows) - 1) if rows[at][0] < rows[at - 1][0] < rows[at + 1][0]]
    strays = strays if len(strays) < 3 else []  # a single row among those of a stretch is of no other start
    for at, (step, values) in enumerate(rows):
        is_known = at in strays and step in parts[-1].rows and not is_beside(values)
        if is_known and not parts[-1].takes(step, values, is_folded):
            notes.append(f"The row of step {step} between those of later steps in {source} is left out.")
            continue
        if parts and step not in parts[-1].rows and all(map(_is_evaluations, values)) and is_beside(values):
            parts[-1].add_late(values)  # it may count otherwise
            continue
        if not parts or not parts[-1].takes(step, values, is_folded) or parts[-1].begins_anew(rows[at : at + 2]):
            if parts and is_beside(values):
                if step < next(iter(parts[-1].rows)):  # an evaluation's, by the epoch
                    parts[-1].add_late(values)
                else:
                    parts[-1].rows[step] = values | parts[-1].rows.get(step, {})
                continue
            parts.append(_Stretch())
        elif step in parts[-1].rows and values and parts[-1].rows[step].items() >= values.items():
            num_same += 1
        parts[-1].put(step, values)
    if len(parts) > 1 and len(parts[-1].rows) == 1:  # a bar that a killed process draws at its end
        ((step, values),) = parts[-1].rows.items()
        if any(values.items() <= part.rows.get(step, {}).items() for part in parts[:-1]):
            num_same += 1
            parts.pop()
    if is_folded:
        notes.append(
            f"{source} has several rows for a step ({again} of them): of their "
            f"{'gradient norms the largest' if num_norms else 'values the last'} is shown."
        )
    if num_same:
        verb = "repeats" if num_same == 1 else "repeat"
        notes.append(f"{plural(num_same, 'row')} of {source} {verb} an earlier row of the same step.")
    return [part.rows for part in parts], notes


class _Stretch:
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
        return all(self._latest.get(name, -math.inf) < step for name in values if not is_bookkeeping(name))

    def begins_anew(self, rows: Sequence[Row]) -> bool:
        """Return whether the first of two rows is the stretch's first one again, and the next is not its next."""
        if len(rows) < 2 or rows[0][0] != next(iter(self.rows)) or rows[0][0] == self._last:
            return False
        (step, _), (later, values) = rows
        return step < later <= self._last and not self.takes(later, values, is_folded=False)

    def add_late(self, values: dict[str, float]) -> None:
        """Adds to the last step what it does not have."""
        last = int(self._last)
        self.rows[last] = values | self.rows[last]

    def put(self, step: int, values: dict[str, float]) -> None:
        known = self.rows.setdefault(step, values)  # of a long log a copy would double what is held
        for name, value in values.items() if known is not values else ():
            is_less = name in known and is_norm(name) and math.isfinite(value) and not known[name] <= value
            if not is_less:  # of several norms, the worst
                known[name] = value
        self._last = max(self._last, step)
        self._latest.update(dict.fromkeys(values, step))


def _clash(known: dict[str, float], values: dict[str, float]) -> bool:
    """Return whether two rows say different things of one metric."""
    return any(
        known[name] != value and not (math.isnan(known[name]) and math.isnan(value))
        for name, value in values.items()
        if name in known and not is_bookkeeping(name)
    )


_EVALUATION = re.compile(r"(?:eval|val|test)", re.IGNORECASE)


@lru_cache(maxsize=4096)
def _is_evaluations(name: str) -> bool:
    return is_bookkeeping(name) or _EVALUATION.match(name) is not None


@lru_cache(maxsize=4096)
def is_bookkeeping(name: str) -> bool:
    """Return whether a metric counts or dates rows, and so says nothing of training."""
    return name.rpartition("/")[2] in _BOOKKEEPING or name.startswith("_")


def _use_known_names(run: LoggedRun, metric: str | None) -> None:
    """Lets the run's metrics go by verl's names, too; ``metric``, where it is given, by that of the gradient norm."""
    counts: Counter[str] = Counter()
    for part in run.parts:
        counts.update({name: len(values) - values.count(None) for name, values in part.series.items()})
    losses = [name for name in counts if is_training_loss(name)]
    zeros = {name for name in losses if not any(any(part.series.get(name, ())) for part in run.parts)}
    known = canonical({name: count for name, count in counts.items() if name not in zeros or zeros == {*losses}})
    norm = norm_of(counts) if metric is None else metric
    if norm is not None and norm not in (MAX, MEAN):
        known[MEAN] = norm
    for part in run.parts:
        if metric is not None:
            norms = part.series.get(metric)
            part.series = {name: values for name, values in part.series.items() if name not in (MAX, MEAN)}
            part.series.update({metric: norms, MEAN: norms} if norms else {})
        for name, own in known.items():
            if own in part.series:
                part.series[name] = part.series[own]
                part.called[name] = own
