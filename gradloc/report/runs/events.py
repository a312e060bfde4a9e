# SPDX-License-Identifier: Apache-2.0
"""Reads a run's events, with a row of each in memory and the record on demand, and the files of their folders.

A run that is still going, or was killed while writing, leaves a cut-off last line of events.jsonl. That is a note, not
an error: everything before it is whole.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...explain.story import cause_of, shown_verdict
from ...explain.text import first_of, one_line, plural
from ...record import EVENT_VERSION, Event
from ...record.bundle import Sequence as TokenSequence
from ...record.bundle import SequenceFile
from ...record.files import DOCUMENT, MB, is_inside, parse_json, read_bytes, read_json
from ...record.reading import read
from ..memory import uncollected

KEPT = 256
"""Whole events that stay in memory, and as many that were read again."""
WORDS = 24
"""Most different texts of an event's culprits that can be searched."""
_IS_PICTURE = re.compile(r"picture-[0-9a-f]{12}\.png")
_PNG = b"\x89PNG\r\n"
RECORDS = ("meta", "event")
"""The files of an event's folder that hold its record: with a bundle, and without."""


def is_event(folder: Path) -> bool:
    """Return whether this is the folder of one event."""
    return folder.absolute().parent.name == "events" and any((folder / f"{name}.json").is_file() for name in RECORDS)


LISTED = (
    *("schema_version", "event_id", "run", "step", "trigger", "search", "culprits", "certificate", "action"),
    *("cause", "fault", "model", "folder"),
)
"""Fields of an event that its row is made of."""


class EventRow(NamedTuple):
    """One event's row in a list."""

    event_id: str
    step: int
    epoch: int
    mini_batch: int
    model: str
    norm: float | None
    threshold: float | None
    verdict: str
    action: str
    fault: str
    """Link that broke; empty where it was not looked for."""
    cause: str
    token: str
    """The largest culprit's text; empty where there is none."""
    num_culprits: int
    words: str
    """The culprits' texts."""
    seconds: float | None
    """Seconds of its search."""
    trainer: str
    name: str
    """Name of the run by the event."""
    folder: str

    @property
    def is_explained(self) -> bool:
        """Whether a measurement says what made the spike: tokens, or another link than the batch."""
        return self.verdict in ("explained", "not_the_data")

    @property
    def severity(self) -> float:
        """Return the norm over its threshold, infinity for a norm that is not finite."""
        if self.norm is None:
            return 0.0
        if self.norm != self.norm:
            return float("inf")
        return self.norm / self.threshold if self.threshold else self.norm


_same = functools.cache(str)
"""Cache of texts, since 100,000 rows have few different ones."""


def row_of(event: Event) -> EventRow:
    """Return an event's row."""
    first, step, trigger, run = event.leader, event.step, event.trigger, event.run
    words: dict[str, None] = {}
    for culprit in event.culprits:
        words[one_line(culprit.text, 24)] = None
        if len(words) > WORDS:
            break
    return EventRow(
        event_id=event.event_id,
        step=step.global_step,
        epoch=step.epoch,
        mini_batch=step.mini_batch,
        model=_same(event.model or ""),
        norm=trigger.grad_norm,
        threshold=trigger.threshold,
        verdict=_same(shown_verdict(event)),
        action=_same(event.action.taken),
        fault=_same(event.fault.at if event.fault else ""),
        cause=_same(cause_of(event)),
        token=_same(first.text[:200] if first else ""),
        num_culprits=len(event.culprits),
        words=_same(" ".join(words)),
        seconds=event.search.seconds,
        trainer=_same(run.trainer or ""),
        name=_same(" / ".join(part for part in (run.project, run.experiment) if part)),
        folder=event.folder or "",
    )


class Events(Sequence[Event]):
    """A run's events in order. Rows stay in memory; a record beyond the first ones is read from the file again."""

    def __init__(self, events: Iterable[Event] = ()):
        self.rows: list[EventRow] = []
        self._held: list[Event | tuple[Path, int]] = []
        """Each event, or its file and the byte that its line begins at."""
        self._read = functools.lru_cache(maxsize=KEPT)(_read_at)
        for event in events:
            self.add(event)

    def add(self, event: Event, place: tuple[Path, int] | None = None) -> None:
        """Append an event; ``place`` is its file and the byte that its line begins at, None: it stays in memory."""
        self.rows.append(row_of(event))
        self._held.append(event if place is None or len(self.rows) <= KEPT else place)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Event:  # type: ignore[override]
        held = self._held[at]
        return held if isinstance(held, Event) else self._read(*held, self.rows[at].event_id)

    def in_order(self) -> "Events":
        """Sort by step, epoch and mini-batch."""
        made = Events()
        order = sorted(range(len(self)), key=lambda at: (*self.rows[at][1:4], at))
        made.rows, made._held = [self.rows[at] for at in order], [self._held[at] for at in order]
        return made


def _read_at(path: Path, start: int, event_id: str) -> Event:
    """Read the event whose line begins at this byte."""
    with path.open("rb") as file:
        file.seek(start)
        raw = _parse(file.readline(DOCUMENT))
    try:
        event = read(Event, raw)
    except ValueError:  # a field that its row does without
        event = read(Event, _listed(raw))
    return replace(event, event_id=event_id)


def _parse(line: bytes) -> Any:
    return parse_json(line.decode("utf-8", errors="replace"), has_levels=False)


def _listed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an event's row is made of."""
    return {name: raw[name] for name in LISTED if name in raw}


def read_events(path: Path) -> tuple[Events, list[str]]:
    """Read an existing events.jsonl: its events in order, and a sentence per unreadable part."""
    events, notes = Events(), list[str]()
    if not is_inside(path, path.parent):
        return events, [f"{path.name} is a link out of the run's folder, and was not followed."]
    names, counts = set[str](), Counter[str]()
    with path.open("rb") as lines, uncollected():
        start = 0
        for number, line in enumerate(iter(lambda: lines.readline(DOCUMENT), b""), start=1):
            place, start = (path, start), start + len(line)
            if len(line) == DOCUMENT and not line.endswith(b"\n"):
                notes.append(f"Line {number} of events.jsonl was left out: it is larger than {DOCUMENT / MB:g} MB.")
                while not line.endswith(b"\n") and (line := lines.readline(DOCUMENT)):
                    start += len(line)
                continue
            if not line.strip():
                continue
            event, note = _read_line(line, number, is_whole=len(events) < KEPT)
            if note:
                notes.append(note)
            if event is not None:
                name = event.event_id or f"line-{number}"
                while (unique := f"{name}-{counts[name]}" if counts[name] > 1 else name) in names:
                    counts[name] += 1
                names.add(unique)
                events.add(event if unique == event.event_id else replace(event, event_id=unique), place)
    return events, notes


def _read_line(line: bytes, number: int, is_whole: bool) -> tuple[Event | None, str | None]:
    """Read an event, as a whole or as far as its row needs it, and a note on what is wrong with it."""
    where = f"Line {number} of events.jsonl"
    try:
        raw = _parse(line)
    except json.JSONDecodeError:
        if not line.endswith(b"\n"):
            return None, f"The last line of events.jsonl (line {number}) is cut off and was left out."
        return None, f"{where} is not JSON and was left out."
    except ValueError as error:
        return None, f"{where} was left out: {error}."
    if not isinstance(raw, dict) or not raw.keys() & {"event_id", "step", "culprits"}:
        return None, f"{where} is no event record and was left out."
    version = raw.get("schema_version")
    is_known = version in (1, EVENT_VERSION)
    try:
        event = read(Event, raw if is_whole else _listed(raw))
    except ValueError as error:
        of = "" if is_known else f" is of schema version {version!r} (known: 1, {EVENT_VERSION}) and"
        return None, f"{where}{of} cannot be read ({error}); it was left out."
    reads = f"is of schema version {version!r}, and this reader knows versions 1 and {EVENT_VERSION}"
    return event, None if is_known else f"{where} {reads}: it is shown as far as it could be read."


def recover(root: Path, listed: Events) -> tuple[list[Event], list[str]]:
    """Read events whose folders exist but that events.jsonl does not list, with sentences about them.

    A run that was killed while it wrote, or a copy that was cut short, loses lines of events.jsonl, or all of it; the
    record is in the event's own folder as well.
    """
    known = {row.folder for row in listed.rows} | {row.event_id for row in listed.rows}
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
    """Read a JSON file of an event's folder; empty where it cannot be read or leads out of the run's folder."""
    with suppress(OSError, ValueError):
        record = read_json(folder / f"{name}.json", root) if folder else {}
        return record if isinstance(record, dict) else {}
    return {}


def read_actor(root: Path, event: Event) -> dict[str, Any]:
    """Read the run's ``actor_rollout_ref.actor`` from the event's bundle; empty where it is not there."""
    actor = _read_record(bundle_folder(root, event), root).get("actor")
    return actor if isinstance(actor, dict) else {}


def read_sequences(root: Path, event: Event) -> tuple[list[TokenSequence], str | None]:
    """Read the culprits' sequences token by token, or a sentence why they are missing.

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
    """Read the pictures of these sequences' prompts by file name, with a sentence when some are missing.

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
    """Return the event's bundle folder, or None when it names none, or one outside the run's folder."""
    # The record is not trusted: "../.." must not make the report read somebody else's files.
    if not event.folder or "\0" in event.folder or not is_inside(root / event.folder, root):
        return None
    return root / event.folder
