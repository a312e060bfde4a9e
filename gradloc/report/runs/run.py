# SPDX-License-Identifier: Apache-2.0
"""Finds and reads the events and metrics in a run's folder, with sentences about what could not be read."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ...explain.advice import actions_of, is_trl, supervised
from ...explain.next_step import NextStep, next_step
from ...explain.story import cause_of
from ...explain.text import first_of, plural, spoken
from ...health import Reason
from ...health.rules import ADVICE
from ...record import Event
from ...record.files import is_inside
from .. import logs
from ..errors import ReportError, did_you_mean
from ..logs import LoggedRun, files_of
from ..logs.formats import check
from ..logs.recording import MAX, MEAN, Metrics
from .diagnosis import Diagnosis, diagnose
from .events import RECORDS, EventRow, Events, is_event, read_actor, read_events, recover
from .signals import is_supervised, trainer_class

DEPTH = 3
"""Levels of folders in which events are looked for."""
_ROUNDED = 0.02
"""Relative error of a norm that a log rounds."""
_MOST_UPDATES = 8
"""Epochs over a rollout at most; mini-batches of one that does not say how many it has."""
MOST_RUNS = 400
"""Most runs of a log that are diagnosed, those with the highest norms."""


class EventGroup(NamedTuple):
    """Events of one kind."""

    fault: str
    cause: str
    count: int
    last: int
    """Step of the last one."""
    worst: EventRow


@dataclass
class RunFolder:
    """A run's content, and a sentence per unreadable part."""

    path: Path
    events_root: Path | None = None
    """Folder of events.jsonl; None for logs alone."""
    events: Events = field(default_factory=Events)
    runs: list[LoggedRun] = field(default_factory=list)
    """Runs in the logs; the page is about the first."""
    notes: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    """Arguments of a command that reads the first run of a log again."""

    @property
    def metrics(self) -> Metrics:
        """Return the first run's metrics: every step as it was logged last."""
        return self.runs[0].metrics if self.runs else Metrics()

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        """Diagnose each run by its log alone, once."""
        return [diagnose(run) for run in self.runs]

    @property
    def trainer(self) -> str | None:
        """Return the trainer's name by the events, else by the log of the first run."""
        known = (row.trainer for row in self.events.rows if row.trainer)
        return next(known, self.runs[0].trainer if self.runs else None)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the first run's settings by verl's names, as far as its log has them."""
        return self.runs[0].settings if self.runs else {}

    def next_step(self, event: Event) -> NextStep | None:
        """Return what to do about an event; None where the run does all of it already."""
        return next_step(event, read_actor(self.events_root or self.path, event))

    def advice(self, reason: Reason, step: int) -> list[tuple[str, str]]:
        """Return the advice for a reason of the health rules at a step, as pairs of a sentence and a line.

        A rule on gradients has the advice of the step's event, which knows the cause. A supervised run gets no advice
        on rollouts, rewards and a KL; one with events has no GradLoc to turn on; and where a log's diagnosis says
        whether to go back, no rule says otherwise.
        """
        names = ADVICE[reason.name]
        at_step = [(row.severity, at) for at, row in enumerate(self.events.rows) if row.step == step]
        if at_step and {"localize", "mask"} & {*names}:
            found = self.next_step(self.events[max(at_step)[1]])
            lines = found.lines if found is not None else {}
            return [(f"{found.do} ({label})" if label else found.do, line) for label, line in lines.items()]
        said = {"localize"} if self.events.rows else set[str]()
        if not self.events.rows and any(diagnosis.advice for diagnosis in self.diagnoses[:1]):
            said = {"go_back"}
        names = tuple(name for name in names if name not in said)
        if not is_supervised(self.metrics):
            return actions_of(names, self.trainer, self.settings)
        found = actions_of(supervised(names), self.trainer, self.settings)
        return [(do, line.replace("GRPOTrainer", trainer_class(self.metrics))) for do, line in found]

    @property
    def name(self) -> str:
        """Return project and experiment by the events, else the folder's name."""
        named = next((row.name for row in self.events.rows if row.name), "")
        if named:
            return named
        return "standard input" if str(self.path) == "-" else self.path.resolve().name

    @cached_property
    def _steps_of(self) -> dict[tuple[str, str], list[int]]:
        """The events' steps by cause and token."""
        found: dict[tuple[str, str], list[int]] = {}
        for row in self.events.rows:
            found.setdefault((row.cause, row.token), []).append(row.step)
        return found

    def seen(self, event: Event) -> str:
        """Say how often this token had this cause, and how often this cause came."""
        cause, num_events = cause_of(event), len(self.events)
        alike = self._steps_of.get((cause, event.leader.text[:200] if event.leader else ""), [])
        same = sum(len(steps) for (label, _), steps in self._steps_of.items() if label == cause)
        of = f"{spoken(cause) if cause else 'no cause'}: {same} of {plural(num_events, 'event')}"
        if len(alike) < 2:
            return f"once, at step {event.step.global_step}" + (f"; {of}" if num_events > 1 else "")
        again = "this token" if event.culprits else "the same"
        return f"{again} {len(alike)} times, first at step {min(alike)}, last at step {max(alike)}; {of}"

    @property
    def groups(self) -> list[EventGroup]:
        """Group the events by fault and cause, the commonest first."""
        found: dict[tuple[str, str], list[EventRow]] = {}
        for row in self.events.rows:
            found.setdefault((row.fault, row.cause), []).append(row)
        groups = [
            EventGroup(*kind, len(rows), max(row.step for row in rows), max(rows, key=lambda row: row.severity))
            for kind, rows in found.items()
        ]
        return sorted(groups, key=lambda group: (-group.count, group.fault, group.cause))

    def show_command(self, event_id: str) -> str:
        """Return the command that shows one event with every token."""
        return f"gradloc report {shlex.quote(str(self.path))} --event {shlex.quote(event_id)}"

    def find(self, event_id: str) -> Event:
        """Return the event of this name; raise ReportError with the known names."""
        known = {row.event_id: at for at, row in enumerate(self.events.rows)}
        if event_id in known:
            return self.events[known[event_id]]
        guess = did_you_mean(event_id, known) or f": it has {first_of(list(known)) or 'none'}."
        raise ReportError(f"{self.path} has no event {event_id!r}{guess}")


def read_run(
    path: Path, metrics_path: Path | None = None, metric: str | None = None, pattern: str | None = None
) -> RunFolder:
    """Read a run.

    Args:
        path: the run's folder, the folder of its events, its events.jsonl, or the folder of one event; or, of a run
            without events, its log.
        metrics_path: where the metrics are, when not in the run's folder.
        metric: the one that holds the gradient norms, where its name does not say so.
        pattern: finds the norm in a line of a log that has no form of its own; see
            ``logs.lines.read_by_pattern``.

    Raises:
        ReportError: when there is neither an event nor a metric to show.
    """
    if path.name == "gradloc" and not path.exists() and path.absolute().parent.is_dir():
        raise ReportError(f"{path} does not exist, as no event was written there: name {path.parent}.")
    check(path)
    is_of_events = path.absolute().name == "events" and any(map(is_event, path.glob("*")))
    if is_of_events or path.name == "events.jsonl" or path.is_file() and is_event(path.parent):
        path = path.parent if path.name else path.absolute().parent
    if not path.is_dir() or pattern is not None:
        if metrics_path is not None:
            raise ReportError(f"--metrics goes with a folder of events, and {path} is read as a log: leave it out.")
        return read_logs([path], metric, pattern=pattern)
    if is_event(path):
        return _one_event(path, metrics_path, metric)
    events_file = _events_file(path)
    if events_file is None:
        return read_logs([metrics_path or path], metric, path)
    run = RunFolder(path, events_file.parent, named=[str(path)])
    if events_file.is_file():
        run.events, run.notes = read_events(events_file)
    recovered, notes = recover(events_file.parent, run.events)
    run.notes += notes
    if recovered:
        for event in recovered:
            run.events.add(event)
        run.events = run.events.in_order()
    _add_metrics(run, metrics_path, metric)
    _check(run, events_file)
    return run


def has_events(path: Path) -> bool:
    """Return whether a folder holds GradLoc's events, of one run or several."""
    try:
        return path.is_dir() and _events_file(path) is not None
    except ReportError:  # of several
        return True


def read_logs(
    paths: Sequence[Path], metric: str | None = None, path: Path | None = None, pattern: str | None = None
) -> RunFolder:
    """Read runs from logs alone, the worst first, and of those without a fault the ones of a few rows last.

    ``path`` is the path that the user named, where the logs are elsewhere.
    """
    run = RunFolder(path or paths[0])
    _add_runs(run, paths, metric, pattern)
    run.runs.sort(key=lambda logged: (logged.peak, len(logged.metrics.steps)), reverse=True)
    if len(run.runs) > MOST_RUNS:
        run.notes.append(f"{len(run.runs) - MOST_RUNS:,} more runs, with lower norms, are left out.")
        del run.runs[MOST_RUNS:]
    if len(run.runs) > 1:  # one is diagnosed where that is asked for
        order = sorted(range(len(run.runs)), key=lambda at: run.diagnoses[at].gravity, reverse=True)
        run.runs, run.diagnoses = ([each[at] for at in order] for each in (run.runs, run.diagnoses))
    own = (named for named in paths if len(paths) > 1 and named.name == run.runs[0].parts[0].source)
    run.named = [str(next(own, run.path))]
    for option, given in (("--metric", metric), ("--pattern", pattern)):
        run.named += [option, given] if given else []
    _note_verdicts(run)
    return run


def _add_runs(run: RunFolder, paths: Sequence[Path], metric: str | None, pattern: str | None = None) -> None:
    run.runs, notes = logs.read(paths, metric, pattern)
    run.notes += [*notes, *(note for logged in run.runs for note in logged.notes)]


def _one_event(folder: Path, metrics_path: Path | None, metric: str | None) -> RunFolder:
    """Read the run of an event's folder, with that event alone."""
    run = read_run(folder.absolute().parent.parent, metrics_path, metric)
    named = [
        at for at, row in enumerate(run.events.rows) if row.folder and Path(row.folder).name == folder.absolute().name
    ]
    run.events = Events(run.events[at] for at in named)
    if not run.events:
        raise ReportError(
            f"{folder} holds no event that can be read: its meta.json is cut off, and events.jsonl lacks it."
        )
    return run


def _events_file(path: Path) -> Path | None:
    """Find the nearest events.jsonl; where it is lost, its place next to a folder of events."""
    files = [file for file in files_of(path, DEPTH) if file.name == "events.jsonl"]
    least = min((len(file.parts) for file in files), default=0)
    nearest = [file for file in files if len(file.parts) == least]
    if len(nearest) > 1:
        names = ", ".join(str(file.parent) for file in nearest[:4])
        raise ReportError(f"several runs are under this folder: name one of {names}.")
    for folder in () if nearest else (path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))):
        if is_inside(folder, path) and any(any((folder / "events").glob(f"[!.]*/{name}.json")) for name in RECORDS):
            return folder / "events.jsonl"
    return nearest[0] if nearest else None


def _add_metrics(run: RunFolder, named: Path | None, metric: str | None) -> None:
    """Add the runs in logs, the longest first: the named ones, else what may be of the events' run in the folder that
    it wrote them to, else in the path.
    """
    if named is not None:
        _add_runs(run, [named], metric)
    root = run.events_root or run.path
    places = [[root.parent], [run.path]] if root != run.path else [[root]]
    if root == run.path:  # the events' folder was named: the metrics are usually one folder up
        siblings = [*files_of(run.path.resolve().parent, 0)]
        places.append([entry for entry in siblings if entry.suffix in (".jsonl", ".csv", ".log")])
    left_out: list[str] = []
    error = None
    for paths in [] if named is not None else places:
        before = len(run.notes)
        try:
            _add_runs(run, paths, metric)
        except ReportError as refusal:
            error = error or refusal
        others = [logged for logged in run.runs if not _may_be_of(logged, run)]
        if others:
            left_out = [logged.name for logged in others]
            run.runs = [logged for logged in run.runs if logged not in others]
            run.notes = run.notes[:before] + [note for logged in run.runs for note in logged.notes]
        if run.runs:
            break
    if error is not None and metric is not None and not run.runs:
        raise error
    if left_out:
        whose = "another run's" if len(left_out) == 1 else "other runs'"
        run.notes.append(
            f"{plural(len(left_out), 'log')} of the folder left out as {whose}, by the norm at the events' steps: "
            f"{first_of(left_out)}."
        )
    run.runs.sort(key=lambda logged: len(logged.metrics.steps), reverse=True)


def _may_be_of(logged: LoggedRun, run: RunFolder) -> bool:
    """Return whether a log may be of the run that wrote the events.

    Its norm at an event's step is the event's, or the mean of this and those of the step's other mini-batches. Else it
    must be in the folder that the run writes to, and have no norm at these steps, or metrics of GradLoc's: a run that
    was begun anew may have overwritten them.
    """
    has_norm = False
    for part in logged.parts:
        means, largest = (dict(part.logged(name)) for name in (part.norm or MEAN, MAX))
        for at, row in enumerate(run.events.rows):
            mean = means.get(row.step)
            if row.norm is None or mean is None:
                continue
            num_updates = _MOST_UPDATES * (run.events[at].step.num_mini_batches or _MOST_UPDATES)
            is_near = math.isclose(largest.get(row.step, mean), row.norm, rel_tol=_ROUNDED)
            is_near |= row.norm / num_updates <= mean <= row.norm * (1 + _ROUNDED)
            if is_near or not math.isfinite(row.norm) and not math.isfinite(mean):
                return True
            has_norm = True
    is_watched = any(name.startswith("gradloc/") for name in logged.parts[-1].series)
    is_own = logged.folder is not None and is_inside(logged.folder, (run.events_root or run.path).parent)
    return is_own and (is_watched or not has_norm)


def _check(run: RunFolder, events_file: Path) -> None:
    """Note missing parts; raise ReportError where there is nothing to show."""
    if run.events and not run.metrics:
        trainer = run.events.rows[0].trainer
        way = "write norm, loss or reward of each step to a CSV"
        if is_trl(trainer):
            way = "save a checkpoint, whose trainer_state.json has them"
        elif (trainer or "verl").startswith("verl"):
            way = "add `file` to trainer.logger"
        run.notes.append(
            "No metrics were found with the events, so the curve shows the events alone: "
            f"{way}, or name them with --metrics."
        )
    elif run.metrics.verdicts and not run.events:
        _note_verdicts(run)
    elif run.metrics and not run.events:
        run.notes.append("events.jsonl is empty: no spike was localized.")
    elif not run.events and run.notes:
        raise ReportError(f"{events_file} holds no event that can be read. {run.notes[0]}")
    elif not run.events:
        raise ReportError(f"{events_file} is empty and there are no metrics: there is nothing to show yet.")


def _note_verdicts(run: RunFolder) -> None:
    """Note the number of events in the log whose folder is not here, and their last sentences."""
    if verdicts := run.metrics.verdicts:
        run.notes.append(
            f"{run.metrics.source} has sentences on {plural(len(verdicts), 'event')} whose folder is not here: "
            "name the one that gradloc.dump_dir named."
        )
        run.notes += verdicts[-3:]
