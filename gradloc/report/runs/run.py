# SPDX-License-Identifier: Apache-2.0
"""Finds what a run's folder holds, events and metrics, and reads both.

A user may name the run's folder, the folder of the events inside it (``bisect_dump_dir``), or the
events.jsonl itself.
"""

from dataclasses import dataclass, field
from pathlib import Path

from ...record import Event
from ..errors import ReportError
from ..text import plural
from . import metrics as metrics_files
from . import sources
from .events import read_events, recover
from .metrics import Metrics

DEPTH = 4
"""How many folders down events and metrics are looked for."""
SKIPPED = {"checkpoints", "events", "__pycache__", "wandb", "node_modules", ".git"}


@dataclass
class RunFolder:
    """A run as read: whatever there was, and a sentence for each thing that could not be read."""

    path: Path
    events_root: Path | None = None
    """The folder of events.jsonl."""
    events: list[Event] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Project and experiment where an event says them, else the folder's name."""
        for event in self.events:
            parts = [part for part in (event.run.project, event.run.experiment) if part]
            if parts:
                return " / ".join(parts)
        return self.path.resolve().name

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
        raise ReportError(f"{self.path} has no event {event_id!r}: there are {names}{more}.")


def read_run(path: Path, metrics_path: Path | None = None) -> RunFolder:
    """Read a run.

    Args:
        path: the run's folder, the folder of its events, its events.jsonl, or the folder of one event.
        metrics_path: where the metrics are, when not in the run's folder.

    Raises:
        ReportError: when there is neither an event nor a metric to show.
    """
    if not path.exists():
        raise ReportError(f"{path} does not exist: name the folder of a run.")
    if path.is_file():
        if path.suffix != ".jsonl":
            raise ReportError(f"{path} is a file: name the folder of a run, or its events.jsonl.")
        path = path.parent
    if path.parent.name == "events" and (path / "meta.json").is_file():
        return _one_event(path, metrics_path)
    run = RunFolder(path)
    files = files_of(path)
    found = _nearest([file for file in files if file.name == "events.jsonl"]) or _unlisted(path)
    if found is not None:
        run.events_root = found.parent
        if found.is_file():
            run.events, run.notes = read_events(found)
        recovered, notes = recover(found.parent, run.events)
        run.notes += notes
        if recovered:
            run.events = sorted([*run.events, *recovered], key=_when)
    _read_metrics(run, files, metrics_path)
    _check(run, found, has_files=bool(files))
    return run


def read_any(path: Path, metrics_path: Path | None = None) -> RunFolder:
    """A run's folder as :func:`read_run` reads it, or a file of its metrics alone as :mod:`.sources` does."""
    if not path.is_file() or path.name == "events.jsonl":
        return read_run(path, metrics_path)
    metrics, notes = sources.read(path)
    return RunFolder(path, metrics=metrics, notes=notes)


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


def _read_metrics(run: RunFolder, files: list[Path], named: Path | None) -> None:
    if named is not None:
        if not named.exists():
            raise ReportError(f"{named} does not exist: --metrics names a file or folder with the run's metrics.")
        run.metrics, notes = sources.read(named)
        run.notes += notes
        return
    if run.events_root == run.path:
        # The events' folder was named: the metrics usually lie one folder up, beside it.
        files = files + [entry for entry in sorted(run.path.resolve().parent.iterdir()) if entry.is_file()]
    candidates = [f for f in files if f.suffix == ".jsonl" and metrics_files.is_metrics_jsonl(f)]
    candidates += [f for f in files if f.suffix.lower() == ".csv" and metrics_files.is_metrics_csv(f)]
    candidates += [f for f in files if ".tfevents." in f.name]
    for candidate in candidates:
        found, notes = metrics_files.read(candidate)
        run.notes += notes
        if found:
            sources.name_alike(found)
            run.metrics = found
            return
    states = [file for file in files if file.name == "trainer_state.json"]  # a Trainer's, in each checkpoint
    if states:
        run.metrics, notes = sources.read(max(states, key=lambda file: file.stat().st_mtime))
        run.notes += notes


def _check(run: RunFolder, events_file: Path | None, has_files: bool) -> None:
    if run.events:
        if not run.metrics:
            run.notes.append(
                "No metrics were found beside the events, so the curve shows the events alone: add "
                "`file` to trainer.logger, or name them with --metrics."
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
        run.notes.append(
            "events.jsonl is empty: no spike was localized."
            if events_file is not None
            else "No events.jsonl was found: no spike was localized, or spike_detection was off."
        )
        return
    if events_file is not None and run.notes:
        raise ReportError(f"{events_file} holds no event that can be read. {run.notes[0]}")
    if events_file is not None:
        raise ReportError(f"{events_file} is empty and there are no metrics: there is nothing to show yet.")
    if not has_files:
        raise ReportError(f"{run.path} is empty: name the folder of a run.")
    raise ReportError(
        f"{run.path} is not the folder of a run: it holds neither events.jsonl nor metrics "
        "(JSONL of verl's file logger, CSV, TensorBoard)."
    )
