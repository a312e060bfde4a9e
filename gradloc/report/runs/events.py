# SPDX-License-Identifier: Apache-2.0
"""Reads events.jsonl and the per-token files beside it; says in sentences what could not be read.

A run that is still going, or that was killed while writing, leaves a cut-off last line. That is a
note, not an error: everything before it is whole.
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...record import SCHEMA_VERSION, Event
from ...record.bundle import Sequence, SequenceFile
from ...record.reading import read
from ...words.text import first_of, plural

_IS_PICTURE = re.compile(r"picture-[0-9a-f]{12}\.png")
_PNG = b"\x89PNG\r\n"


def read_events(path: Path) -> tuple[list[Event], list[str]]:
    """The events of an existing events.jsonl in the order written, and a sentence for each thing not readable."""
    events: dict[str, Event] = {}
    notes: list[str] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event, note = _read_line(line, number, is_last=number == len(lines))
        if note:
            notes.append(note)
        if event is not None:
            name, count = event.event_id or f"line-{number}", 1
            while (unique := name if count == 1 else f"{name}-{count}") in events:
                count += 1
            events[unique] = replace(event, event_id=unique)
    return list(events.values()), notes


def _read_line(line: bytes, number: int, is_last: bool) -> tuple[Event | None, str | None]:
    where = f"Line {number} of events.jsonl"
    try:
        raw = json.loads(line.decode("utf-8", errors="replace"))
    except ValueError:
        if is_last:
            return None, f"The last line of events.jsonl (line {number}) is cut off and was left out."
        return None, f"{where} is not JSON and was left out."
    if not isinstance(raw, dict) or not raw.keys() & {"event_id", "step", "culprits"}:
        return None, f"{where} is no event record and was left out."
    version = raw.get("schema_version")
    is_known = version == SCHEMA_VERSION
    try:
        event = read(Event, raw)
    except ValueError as error:
        of = "" if is_known else f" is of schema version {version!r} (known: {SCHEMA_VERSION}) and"
        return None, f"{where}{of} cannot be read ({error}); it was left out."
    reads = f"is of schema version {version!r}, and this reader knows version {SCHEMA_VERSION}"
    return event, None if is_known else f"{where} {reads}: it is shown as far as it could be read."


def recover(root: Path, listed: list[Event]) -> tuple[list[Event], list[str]]:
    """The events whose folders are there and that events.jsonl does not list, and sentences about them.

    A run that was killed while it wrote, or a copy that was cut short, loses lines of events.jsonl, or all of it; the
    record is in the event's own folder as well.
    """
    known = {event.folder for event in listed} | {event.event_id for event in listed}
    recovered: list[Event] = []
    lost: list[str] = []
    for folder in sorted((root / "events").glob("*/")):
        place = f"events/{folder.name}"
        if known & {place, folder.name}:
            continue
        try:
            event = read(Event, _read_meta(folder).get("event"))
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


def _read_meta(folder: Path | None) -> dict[str, Any]:
    """An event's meta.json; empty where it cannot be read."""
    with suppress(OSError, ValueError):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8", errors="replace")) if folder else {}
        return meta if isinstance(meta, dict) else {}
    return {}


def read_actor(root: Path, event: Event) -> dict[str, Any]:
    """The run's ``actor_rollout_ref.actor``, as the event's bundle has it; empty where it is not there."""
    actor = _read_meta(bundle_folder(root, event)).get("actor")
    return actor if isinstance(actor, dict) else {}


def read_sequences(root: Path, event: Event) -> tuple[list[Sequence], str | None]:
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
        text = path.read_text(encoding="utf-8", errors="replace")
        return list(read(SequenceFile, json.loads(text)).sequences), None
    except (OSError, ValueError):
        return [], f"sequences.json of event {event.event_id} cannot be read: {missing}"


def read_pictures(
    root: Path, event: Event, sequences: list[Sequence], limit: int
) -> tuple[dict[str, bytes], str | None]:
    """The pictures of these sequences' prompts by file name, and a sentence when some are not here.

    From the first on with which all would have more than ``limit`` bytes, none is read.
    """
    names = list(dict.fromkeys(name for sequence in sequences for name in sequence.pictures or ()))
    folder = bundle_folder(root, event)
    pictures: dict[str, bytes] = {}
    for name in names if folder is not None else ():
        content = b""
        with suppress(OSError):  # the record is not trusted: only what the writer would have written
            content = (folder / name).read_bytes() if _IS_PICTURE.fullmatch(name) else b""
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
    if not event.folder or not (root / event.folder).resolve().is_relative_to(root.resolve()):
        return None
    return root / event.folder
