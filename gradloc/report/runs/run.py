# SPDX-License-Identifier: Apache-2.0
"""Finds what a run's folder holds, events and metrics, and reads both.

A user may name the run's folder, the folder of the events inside it (``bisect_dump_dir``), or the
events.jsonl itself.
"""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...record import Event
from ...words.advice import is_trl
from ...words.text import plural
from .. import logs
from ..errors import ReportError
from ..guess import meant
from ..logs import Log, LoggedRun
from ..logs.formats import missing
from .events import read_events, recover
from .metrics import Metrics

DEPTH = 4
"""How many folders down events are looked for."""
SKIPPED = {"checkpoints", "events", "__pycache__", "wandb", "node_modules", ".git"}


@dataclass
class RunFolder:
    """A run as read: whatever there was, and a sentence for each thing that could not be read."""

    path: Path
    events_root: Path | None = None
    """The folder of events.jsonl."""
    events: list[Event] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    """The runs that the logs here tell of: one, where there are events."""
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> Metrics:
        """Of the run that the page is about: every step as it was logged last."""
        return self.log.runs[0].metrics if self.log else Metrics()

    @property
    def name(self) -> str:
        """Project and experiment where an event says them, else the folder's name."""
        for event in self.events:
            parts = [part for part in (event.run.project, event.run.experiment) if part]
            if parts:
                return " / ".join(parts)
        return "standard input" if str(self.path) == "-" else self.path.resolve().name

    def show_command(self, event_id: str) -> str:
        """The command that shows one event with every token."""
        return f"gradloc-report show {shlex.quote(str(self.path))} --event {shlex.quote(event_id)}"

    def find(self, event_id: str) -> Event:
        """The event of that name.

        Raises:
            ReportError: names the events there are.
        """
        for event in self.events:
            if event.event_id == event_id:
                return event
        names = ", ".join(event.event_id for event in self.events[:5]) or "none"
        more = f" and {len(self.events) - 5} more" if len(self.events) > 5 else ""
        guess = meant(event_id, [event.event_id for event in self.events])
        raise ReportError(f"{self.path} has no event {event_id!r}{guess or f': there are {names}{more}.'}")


def read_run(path: Path, metrics_path: Path | None = None, metric: str | None = None) -> RunFolder:
    """Read a run.

    Args:
        path: the run's folder, the folder of its events, its events.jsonl, or the folder of one event; or, of a run
            without events, its log.
        metrics_path: where the metrics are, when not in the run's folder.
        metric: the one that holds the gradient norms, where its name does not say so.

    Raises:
        ReportError: when there is neither an event nor a metric to show.
    """
    if str(path) != "-" and not path.exists():
        raise ReportError(missing(path))
    if path.is_file() and path.name == "events.jsonl":
        path = path.parent
    if not path.is_dir():
        return read_logs([path], metric)
    if path.parent.name == "events" and (path / "meta.json").is_file():
        return _one_event(path, metrics_path)
    run = RunFolder(path)
    files = files_of(path)
    found = _nearest([file for file in files if file.name == "events.jsonl"]) or _unlisted(path)
    if found is None and not any(path.iterdir()):
        raise ReportError(f"{path} is empty: name the folder of a run, or its log.")
    if found is None:
        return read_logs([metrics_path or path], metric, path)
    run.events_root = found.parent
    if found.is_file():
        run.events, run.notes = read_events(found)
    recovered, notes = recover(found.parent, run.events)
    run.notes += notes
    if recovered:
        run.events = sorted([*run.events, *recovered], key=_when)
    _read_metrics(run, metrics_path, metric)
    _check(run, found)
    return run


def read_logs(paths: Sequence[Path], metric: str | None = None, path: Path | None = None) -> RunFolder:
    """Runs of which there are logs alone; the one with the worst gradient norm first.

    Args:
        paths: files, folders, or ``-`` for standard input.
        metric: as :func:`read_run` takes it.
        path: what was named, where the logs lie elsewhere.
    """
    log = logs.read(paths, metric)
    log.runs.sort(key=_peak, reverse=True)
    run = RunFolder(path or paths[0], log=log, notes=_notes(log))
    _check(run, None)
    return run


def _peak(run: LoggedRun) -> float:
    """A run's largest norm over its median, overwritten ones as well."""
    norms = [value for part in run.segments if part.metrics.norm for value in part.metrics.finite(part.metrics.norm)]
    return max(norms) / (sorted(norms)[len(norms) // 2] or 1.0) if norms else 0.0


def _notes(log: Log) -> list[str]:
    return [*log.notes, *(note for run in log.runs for note in run.notes)]


def _when(event: Event) -> tuple[int, int, int]:
    return event.step.global_step, event.step.epoch, event.step.mini_batch


def _one_event(folder: Path, metrics_path: Path | None) -> RunFolder:
    """The run of an event's folder, with that event alone."""
    run = read_run(folder.parent.parent, metrics_path)
    run.events = [event for event in run.events if event.folder and Path(event.folder).name == folder.name]
    if not run.events:
        raise ReportError(
            f"{folder} holds no event that can be read: its meta.json is cut off, and events.jsonl lacks it."
        )
    return run


def _unlisted(path: Path) -> Path | None:
    """Where events.jsonl would be: beside a folder of events, when the file itself is lost."""
    for folder in (path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))):
        if any((folder / "events").glob("*/meta.json")):
            return folder / "events.jsonl"
    return None


def files_of(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Files of a folder, nearest first; big folders that hold neither kind are passed over."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name) if depth else []
    except OSError:  # somebody else's folder inside the run's, or one that just went away, is no reason to stop
        return []
    files = [entry for entry in entries if entry.is_file()]
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and entry.name not in SKIPPED:
            files += files_of(entry, depth - 1)
    return sorted(files, key=lambda file: len(file.parts))


def _nearest(found: list[Path]) -> Path | None:
    if not found:
        return None
    depth = len(found[0].parts)
    rivals = [file for file in found if len(file.parts) == depth]
    if len(rivals) > 1:
        names = ", ".join(str(file.parent) for file in rivals[:4])
        raise ReportError(f"several runs lie under this folder: name one of {names}.")
    return found[0]


def _read_metrics(run: RunFolder, named: Path | None, metric: str | None) -> None:
    if named is not None and not named.exists():
        raise ReportError(f"{named} does not exist: --metrics names a file or folder with the run's metrics.")
    try:
        run.log = logs.read([named or run.path], metric)
    except ReportError:
        if named is not None:
            raise
    if not run.log and run.events_root == run.path:
        # the events' folder was named: the metrics usually lie one folder up, beside it
        beside = [entry for entry in sorted(run.path.resolve().parent.iterdir()) if entry.is_file()]
        with suppress(ReportError):
            run.log = logs.read([entry for entry in beside if entry.suffix in (".jsonl", ".csv", ".log")], metric)
    run.log.runs.sort(key=lambda found: len(found.metrics.steps), reverse=True)
    run.notes += _notes(run.log)


def _check(run: RunFolder, events_file: Path | None) -> None:
    if run.events:
        if not run.metrics:
            has_trl = is_trl(run.events[0].run.trainer)
            way = "save a checkpoint, whose trainer_state.json has them" if has_trl else "add `file` to trainer.logger"
            run.notes.append(
                "No metrics were found beside the events, so the curve shows the events alone: "
                f"{way}, or name them with --metrics."
            )
        return
    if told := run.metrics.verdicts:
        run.notes += [
            f"{run.metrics.source} tells of {plural(len(told), 'event')} whose folder is not here: "
            "name the one that gradloc.dump_dir named.",
            *told[-3:],
        ]
        return
    if run.metrics:
        if events_file is not None:
            run.notes.append("events.jsonl is empty: no spike was localized.")
        return
    if events_file is not None and run.notes:
        raise ReportError(f"{events_file} holds no event that can be read. {run.notes[0]}")
    if events_file is not None:
        raise ReportError(f"{events_file} is empty and there are no metrics: there is nothing to show yet.")
