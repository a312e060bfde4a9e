# SPDX-License-Identifier: Apache-2.0
"""Finds what a run's folder holds, events and metrics, and reads both; says in sentences what could not be read.

A run that is still going, or that was killed while writing, leaves a cut-off last line of events.jsonl. That is a note,
not an error: everything before it is whole.
"""

import gc
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...health import Reason
from ...health.rules import ADVICE
from ...record import EVENT_VERSION, Culprit, Event
from ...record.bundle import Sequence as TokenSequence
from ...record.bundle import SequenceFile
from ...record.files import DOCUMENT, is_inside, parse_json, read_bytes, read_json
from ...record.reading import read
from ...words.advice import actions_of, is_trl, supervised
from ...words.culprits import leader
from ...words.story import cause_of
from ...words.text import first_of, plural
from .. import logs
from ..errors import ReportError, did_you_mean
from ..logs import LoggedRun, files_of
from ..logs.formats import check
from ..logs.recording import Metrics
from .signals import is_supervised, trainer_class

DEPTH = 3
"""How many folders down events are looked for."""
MOST_RUNS = 400
"""Runs of a log that are looked into: those with the highest norms."""
_IS_PICTURE = re.compile(r"picture-[0-9a-f]{12}\.png")
_PNG = b"\x89PNG\r\n"
_RECORDS = ("meta", "event")
"""The files of an event's folder that hold its record: with a bundle, and without."""


@dataclass
class RunFolder:
    """A run as read: whatever there was, and a sentence for each thing that could not be read."""

    path: Path
    events_root: Path | None = None
    """The folder of events.jsonl."""
    events: list[Event] = field(default_factory=list)
    runs: list[LoggedRun] = field(default_factory=list)
    """What the logs tell; the first is the one that the page is about."""
    notes: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    """What a command takes to read the first run of a log again."""

    @property
    def metrics(self) -> Metrics:
        """Of the first run: every step as it was logged last."""
        return self.runs[0].metrics if self.runs else Metrics()

    @property
    def trainer(self) -> str | None:
        """As an event says it, else by the log of the first run."""
        told = (event.run.trainer for event in self.events if event.run.trainer)
        return next(told, self.runs[0].trainer if self.runs else None)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the first run, by verl's names, as far as its log says them."""
        return self.runs[0].settings if self.runs else {}

    def advice(self, reason: Reason) -> list[tuple[str, str]]:
        """What people do about a reason of the health rules: pairs of a sentence and its lines.

        A supervised run gets nothing of rollouts, rewards and a KL.
        """
        metrics, found = self.metrics, reason.advice(self.trainer, self.settings)
        if not is_supervised(metrics):
            return found
        kept = {do for do, _ in actions_of(supervised(ADVICE[reason.name]), self.trainer, self.settings)}
        name = trainer_class(metrics)
        return [(do, line.replace("GRPOTrainer", name)) for do, line in found if do in kept]

    @property
    def name(self) -> str:
        """Project and experiment where an event says them, else the folder's name."""
        for event in self.events:
            parts = [part for part in (event.run.project, event.run.experiment) if part]
            if parts:
                return " / ".join(parts)
        return "standard input" if str(self.path) == "-" else self.path.resolve().name

    @cached_property
    def kinds(self) -> list[tuple[int, str, str]]:
        """Each event's step, and what makes its kind: its cause, and the text of its largest culprit."""
        return [(e.step.global_step, cause_of(e), (leader(e.culprits) or Culprit()).text) for e in self.events]

    def show_command(self, event_id: str) -> str:
        """The command that shows one event with every token."""
        return f"gradloc-report show {shlex.quote(str(self.path))} --event {shlex.quote(event_id)}"

    def find(self, event_id: str) -> Event:
        """The event of that name; raises ReportError with the names there are."""
        known = {event.event_id: event for event in self.events}
        if event_id in known:
            return known[event_id]
        guess = did_you_mean(event_id, known) or f": there are {first_of(list(known)) or 'none'}."
        raise ReportError(f"{self.path} has no event {event_id!r}{guess}")


def read_run(
    path: Path, metrics_path: Path | None = None, metric: str | None = None, pattern: str | None = None
) -> RunFolder:
    """Reads a run.

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
    check(path)
    if path.name == "events.jsonl":
        path = path.parent
    if not path.is_dir() or pattern is not None:
        return read_logs([path], metric, pattern=pattern)
    if path.parent.name == "events" and any((path / f"{name}.json").is_file() for name in _RECORDS):
        return _one_event(path, metrics_path, metric)
    events_file = _events_file(path)
    if events_file is None:
        return read_logs([metrics_path or path], metric, path)
    run = RunFolder(path, events_file.parent)
    if events_file.is_file():
        run.events, run.notes = read_events(events_file)
    recovered, notes = recover(events_file.parent, run.events)
    run.notes += notes
    if recovered:
        run.events += recovered
        run.events.sort(key=lambda event: (event.step.global_step, event.step.epoch, event.step.mini_batch))
    _add_metrics(run, metrics_path, metric)
    _check(run, events_file)
    return run


def read_logs(
    paths: Sequence[Path], metric: str | None = None, path: Path | None = None, pattern: str | None = None
) -> RunFolder:
    """Runs of which there are logs alone; the one with the worst gradient norm first.

    ``path`` is what the user named, where the logs lie elsewhere.
    """
    run = RunFolder(path or paths[0])
    _add_runs(run, paths, metric, pattern)
    run.runs.sort(key=lambda logged: logged.peak, reverse=True)
    if len(run.runs) > MOST_RUNS:
        run.notes.append(f"{len(run.runs) - MOST_RUNS:,} more runs, with lower norms, are left out.")
        del run.runs[MOST_RUNS:]
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
    """The run of an event's folder, with that event alone."""
    run = read_run(folder.parent.parent, metrics_path, metric)
    run.events = [event for event in run.events if event.folder and Path(event.folder).name == folder.name]
    if not run.events:
        raise ReportError(
            f"{folder} holds no event that can be read: its meta.json is cut off, and events.jsonl lacks it."
        )
    return run


def _events_file(path: Path) -> Path | None:
    """The events.jsonl that lies nearest; where it is lost, its place beside a folder of events."""
    files = [file for file in files_of(path, DEPTH) if file.name == "events.jsonl"]
    nearest = [file for file in files if len(file.parts) == min(len(other.parts) for other in files)]
    if len(nearest) > 1:
        names = ", ".join(str(file.parent) for file in nearest[:4])
        raise ReportError(f"several runs lie under this folder: name one of {names}.")
    for folder in () if nearest else (path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/"))):
        if any(any((folder / "events").glob(f"[!.]*/{name}.json")) for name in _RECORDS):
            return folder / "events.jsonl"
    return nearest[0] if nearest else None


def _add_metrics(run: RunFolder, named: Path | None, metric: str | None) -> None:
    """Adds the runs that logs tell of, the longest first."""
    try:
        _add_runs(run, [named or run.path], metric)
    except ReportError:
        if named is not None or metric is not None:
            raise
    if not run.runs and run.events_root == run.path:
        # the events' folder was named: the metrics usually lie one folder up, beside it
        beside = [entry for entry in sorted(run.path.resolve().parent.iterdir()) if entry.is_file()]
        with suppress(ReportError):
            _add_runs(run, [entry for entry in beside if entry.suffix in (".jsonl", ".csv", ".log")], metric)
    run.runs.sort(key=lambda logged: len(logged.metrics.steps), reverse=True)


def _check(run: RunFolder, events_file: Path) -> None:
    """Notes what is missing; raises ReportError where there is nothing to show."""
    if run.events and not run.metrics:
        trainer = run.events[0].run.trainer
        way = "write norm, loss or reward of each step to a CSV"
        if is_trl(trainer):
            way = "save a checkpoint, whose trainer_state.json has them"
        elif (trainer or "verl").startswith("verl"):
            way = "add `file` to trainer.logger"
        run.notes.append(
            "No metrics were found beside the events, so the curve shows the events alone: "
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
    """Notes what the log says of events whose folder is not here: how many, and the last sentences."""
    if verdicts := run.metrics.verdicts:
        run.notes.append(
            f"{run.metrics.source} tells of {plural(len(verdicts), 'event')} whose folder is not here: "
            "name the one that gradloc.dump_dir named."
        )
        run.notes += verdicts[-3:]


# ---- events, and the per-token files beside them


def read_events(path: Path) -> tuple[list[Event], list[str]]:
    """The events of an existing events.jsonl in the order written, and a sentence for each thing not readable."""
    events: dict[str, Event] = {}
    notes: list[str] = []
    if not is_inside(path, path.parent):
        return [], [f"{path.name} is a link out of the run's folder, and was not followed."]
    counts: Counter[str] = Counter()
    with path.open("rb") as lines, _uncollected():
        for number, line in enumerate(iter(lambda: lines.readline(DOCUMENT), b""), start=1):
            if not line.strip():
                continue
            event, note = _read_line(line, number, is_last=not line.endswith(b"\n"))
            if note:
                notes.append(note)
            if event is not None:
                name = event.event_id or f"line-{number}"
                while (unique := f"{name}-{counts[name]}" if counts[name] > 1 else name) in events:
                    counts[name] += 1
                events[unique] = replace(event, event_id=unique)
    return list(events.values()), notes


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from going through 100,000 events again and again: they stay, and form no cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _read_line(line: bytes, number: int, is_last: bool) -> tuple[Event | None, str | None]:
    where = f"Line {number} of events.jsonl"
    try:
        raw = parse_json(line.decode("utf-8", errors="replace"))
    except json.JSONDecodeError:
        if is_last:
            return None, f"The last line of events.jsonl (line {number}) is cut off and was left out."
        return None, f"{where} is not JSON and was left out."
    except ValueError as error:
        return None, f"{where} was left out: {error}."
    if not isinstance(raw, dict) or not raw.keys() & {"event_id", "step", "culprits"}:
        return None, f"{where} is no event record and was left out."
    version = raw.get("schema_version")
    is_known = version in (1, EVENT_VERSION)
    try:
        event = read(Event, raw)
    except ValueError as error:
        of = "" if is_known else f" is of schema version {version!r} (known: 1, {EVENT_VERSION}) and"
        return None, f"{where}{of} cannot be read ({error}); it was left out."
    reads = f"is of schema version {version!r}, and this reader knows versions 1 and {EVENT_VERSION}"
    return event, None if is_known else f"{where} {reads}: it is shown as far as it could be read."


def recover(root: Path, listed: list[Event]) -> tuple[list[Event], list[str]]:
    """The events whose folders are there and that events.jsonl does not list, and sentences about them.

    A run that was killed while it wrote, or a copy that was cut short, loses lines of events.jsonl, or all of it; the
    record is in the event's own folder as well.
    """
    known = {event.folder for event in listed} | {event.event_id for event in listed}
    recovered: list[Event] = []
    lost: list[str] = []
    for folder in sorted((root / "events").glob("[!.]*/")):
        place = f"events/{folder.name}"
        if known & {place, folder.name}:
            continue
        try:
            event = read(Event, _read_record(folder, root).get("event") or _read_record(folder, root, "event") or None)
        except ValueError:
            lost.append(folder.name)
            continue
        recovered.append(replace(event, event_id=event.event_id or folder.name, folder=place))
    notes = []
    if recovered:
        events = plural(len(recovered), "event")
        read_from = "its folder" if len(recovered) == 1 else "their folders"
        names = first_of([event.event_id for event in recovered])
        notes.append(f"{events} that events.jsonl does not list: read from {read_from} ({names}).")
    if lost:
        folders = plural(len(lost), "event folder")
        notes.append(f"{folders} without a whole meta.json, and not in events.jsonl: {first_of(lost)}.")
    return recovered, notes


def _read_record(folder: Path | None, root: Path, name: str = "meta") -> dict[str, Any]:
    """A JSON file of an event's folder; empty where it cannot be read, or leads out of the run's folder."""
    with suppress(OSError, ValueError):
        record = read_json(folder / f"{name}.json", root) if folder else {}
        return record if isinstance(record, dict) else {}
    return {}


def read_actor(root: Path, event: Event) -> dict[str, Any]:
    """The run's ``actor_rollout_ref.actor``, as the event's bundle has it; empty where it is not there."""
    actor = _read_record(bundle_folder(root, event), root).get("actor")
    return actor if isinstance(actor, dict) else {}


def read_sequences(root: Path, event: Event) -> tuple[list[TokenSequence], str | None]:
    """The culprits' sequences token by token, and a sentence when they cannot be had.

    ``root`` is the folder of events.jsonl; an event's ``folder`` is relative to it, and may be null.
    """
    missing = "its token view is missing."
    folder = bundle_folder(root, event)
    if folder is None:
        return [], f"Event {event.event_id} was written without a bundle: {missing}"
    path = folder / "sequences.json"
    if not path.is_file():
        return [], f"The bundle of event {event.event_id} has no sequences.json under {event.folder}: {missing}"
    try:
        return list(read(SequenceFile, read_json(path, root)).sequences), None
    except (OSError, ValueError):
        return [], f"sequences.json of event {event.event_id} cannot be read: {missing}"


def read_pictures(
    root: Path, event: Event, sequences: list[TokenSequence], limit: int
) -> tuple[dict[str, bytes], str | None]:
    """The pictures of these sequences' prompts by file name, and a sentence when some are not here.

    From the first on with which all would have more than ``limit`` bytes, none is read.
    """
    names = list(dict.fromkeys(name for sequence in sequences for name in sequence.pictures or ()))
    folder = bundle_folder(root, event)
    pictures: dict[str, bytes] = {}
    for name in names if folder is not None else ():
        content = b""
        with suppress(OSError, ValueError):  # the record is not trusted: only what the writer would have written
            content = read_bytes(folder / name, root) if _IS_PICTURE.fullmatch(name) else b""
        if not content.startswith(_PNG):
            return pictures, f"{name} of event {event.event_id} cannot be read, so not all pictures are shown."
        if sum(map(len, pictures.values())) + len(content) > limit:
            left = plural(len(names) - len(pictures), "picture")
            return pictures, f"{left} of event {event.event_id} would make this page too large: see {event.folder}."
        pictures[name] = content
    return pictures, None


def bundle_folder(root: Path, event: Event) -> Path | None:
    """The event's bundle folder, or None when it names none, or one outside the run's folder."""
    # The record is not trusted: "../.." must not make the report read somebody else's files.
    if not event.folder or "\0" in event.folder or not is_inside(root / event.folder, root):
        return None
    return root / event.folder
