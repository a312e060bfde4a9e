# SPDX-License-Identifier: Apache-2.0
"""Reads trackers' own files as bytes, by SQLite or as text; no tracker needs to be installed.

What TensorBoard, W&B and SwanLab write while a run goes on are streams of records with a length before each, a record
being a protocol buffer. A run that was killed leaves its last record cut off; everything before it is whole.
"""

import re
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from glob import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from ...explain.text import plural
from ...record.files import QUERY_SECONDS, RECORD, is_inside, parse_json, read_bytes
from ..errors import ReportError
from .names import as_step, number, numbers
from .recording import Recording, flat, gather
from .source import Source

_BLOCK = 1 << 15
_HEADER = 7
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_LENGTH = rb"[\x80-\xff]*[\x00-\x7f]"
_SCALAR = re.compile(  # time, step, summary: value: tag, float; what nearly every record is, in a fifth of the time
    rb"\x09.{8}\x10(" + _LENGTH + rb")\x2a" + _LENGTH + rb"\x0a" + _LENGTH + rb"\x0a([\x01-\x7f])(.+)\x15(.{4})",
    re.DOTALL,
)
_TENSORS = {1: _FLOAT, 2: _DOUBLE}  # TensorFlow's DT_FLOAT and DT_DOUBLE


def is_tensorboard(source: Source) -> bool:
    """Return whether the first record is an event with a time."""
    head = source.head
    is_event = len(head) > 21 and head[4:8] == b"\0\0\0\0" and head[12:13] == b"\x09" and head[0] < 64
    return ".tfevents." in source.name or source.coding is None and is_event


def read_tensorboard(source: Source) -> list[Recording]:
    """Scalars of one event file."""
    rows = gather(_scalars(_framed(source.stream)))
    return [Recording(source.name, "TensorBoard", rows=rows, notes=source.notes)]


def _framed(stream: BinaryIO) -> Iterator[bytes]:
    """TFRecord: a length of 8 bytes, its checksum of 4, the record, its checksum of 4; longer records are left out."""
    while len(head := stream.read(12)) == 12:
        length = int.from_bytes(head[:8], "little")
        record = stream.read(min(length, RECORD))
        left = length - len(record)
        while left and (part := stream.read(min(left, RECORD))):
            left -= len(part)
        if left:
            return
        if length <= RECORD:
            yield record
        stream.read(4)


def _scalars(records: Iterator[bytes]) -> Iterator[tuple[int, str, float]]:
    for record in records:
        plain = _SCALAR.fullmatch(record)
        if plain is not None and len(plain[3]) == plain[2][0]:
            yield _varint(plain[1], 0)[0], _text(plain[3]), _FLOAT.unpack(plain[4])[0]
            continue
        event = dict(fields(record))
        step = event.get(2, 0)
        for field, item in fields(event.get(5)):
            value = dict(fields(item)) if field == 1 else {}
            scalar, tag = _number(value.get(2), _FLOAT), _text(value.get(1))
            if scalar is None:
                scalar = _tensor(value.get(8))
            if scalar is not None and tag and isinstance(step, int):
                yield step, tag, scalar


def _tensor(content: Any) -> float | None:
    """Return the number of a tensor that holds one, as TensorFlow 2 writes scalars."""
    tensor = dict(fields(content))
    kind = _TENSORS.get(tensor.get(1))
    content = next((tensor[field] for field in (4, 5, 6) if isinstance(tensor.get(field), bytes)), None)
    return None if kind is None else _number(content, kind)


def read_wandb(source: Source) -> list[Recording]:
    """History and configuration of a ``run-*.wandb`` file."""
    made = Recording(source.name, "W&B's local run", notes=source.notes)
    for record in _logged(source.stream):
        for field, value in fields(record):
            if field == 2:
                _add_history(made, value)
            elif field == 17:
                run = dict(fields(value))
                made.run = _text(run.get(8)) or made.run
                _add_config(made, run.get(4))
            elif field == 5:
                _add_config(made, value)
    return [made]


def _add_history(made: Recording, content: Any) -> None:
    row: dict[str, float] = {}
    step = None
    for field, value in fields(content):
        if field == 1:
            key, item = _item(value)
            if key == "_step":
                step = as_step(number(item))
            else:
                row.update(numbers({key: item}))
        elif field == 2:
            step = as_step(number(dict(fields(value)).get(1, step)))
    own = next((row[name] for name in ("train/global_step", "trainer/global_step") if name in row), step)
    if (at := as_step(own)) is not None and row:
        made.rows.append((at, row))


def _add_config(made: Recording, content: Any) -> None:
    for field, value in fields(content):
        if field == 1:
            key, item = _item(value)
            if key and not key.startswith("_"):
                made.config.update(flat(item, key))


def _item(content: Any) -> tuple[str, Any]:
    """Return a key, which may be nested, and its value in JSON."""
    texts: dict[int, list[str]] = {1: [], 2: [], 16: [""]}
    for field, value in fields(content):
        if field in texts:
            texts[field].append(_text(value))
    try:
        item = parse_json(texts[16][-1])
    except ValueError:
        item = None
    return "/".join(texts[1] + texts[2]), item


def read_swanlab(source: Source) -> list[Recording]:
    """Scalars of a ``run-*.swanlab`` file."""
    triples = []
    made = Recording(source.name, "SwanLab's local run", notes=source.notes)
    for record in _logged(source.stream):
        for field, value in fields(record):
            inner = dict(fields(value)) if field in (10, 13) else {}
            if field == 10:
                made.run = _text(inner.get(4)) or made.run
            elif field == 13:
                scalar = _number(dict(fields(inner.get(5))).get(1), _DOUBLE)
                if scalar is not None and isinstance(inner.get(2), int):
                    triples.append((inner[2], _text(inner.get(1)), scalar))
    made.rows = gather(triples)
    return [made]


def _logged(stream: BinaryIO) -> Iterator[bytes]:
    """LevelDB's log after a head of 7 bytes: blocks of 32 KiB, a record in one part or several."""
    at, record = _HEADER, bytearray()
    is_whole = False
    while block := stream.read(_BLOCK):
        while at + _HEADER <= len(block):
            length, kind = struct.unpack_from("<HB", block, at + 4)
            begin, at = at + _HEADER, at + _HEADER + length
            if kind not in (1, 2, 3, 4) or at > len(block):  # what is damaged costs its block
                is_whole = False
                break
            if kind in (1, 2):
                record, is_whole = bytearray(), True
            record += block[begin:at]
            is_whole = is_whole and len(record) <= RECORD
            if not is_whole:
                record.clear()
            elif kind in (1, 4):
                yield bytes(record)
        at = 0


def fields(content: Any) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer: numbers, and bytes as they are. What is damaged ends it; a number has
    none.
    """
    at, end = 0, len(content) if isinstance(content, bytes) else 0
    while at < end:
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if kind == 2:
            length, at = _varint(content, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            return
        if at + length > end:
            return
        yield key >> 3, content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < 70:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value & (1 << 64) - 1, at


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else ""


def _number(value: Any, kind: struct.Struct) -> float | None:
    return kind.unpack(value)[0] if isinstance(value, bytes) and len(value) == kind.size else None


# ---- MLflow's folder of files, and the SQLite files of MLflow and trackio


def read_database(source: Source) -> list[Recording]:
    """Return every run in an MLflow or trackio database; of tables alone, since a view may have no end."""
    where = source.path.resolve().as_uri()
    for mode in ("ro", "ro&immutable=1"):  # the second where the folder cannot be written: a journal needs that
        clock = _Clock(sum(file.stat().st_size for file in source.path.parent.glob(f"{escape(source.path.name)}*")))
        try:
            with closing(sqlite3.connect(f"{where}?mode={mode}", uri=True)) as database:
                database.text_factory = lambda text: text.decode("utf-8", errors="replace")
                database.set_progress_handler(clock.tick, 100_000)
                if hasattr(database, "setlimit"):
                    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, RECORD)
                database.execute("pragma trusted_schema = off")
                if (tables := _tables(database)) is None:
                    raise ReportError(f"{source.name} has views or computed columns in place of tables: none is run.")
                columns = [row[1] for row in database.execute("pragma table_info(metrics)")]
                if "metrics" in columns:
                    return _read_trackio(source, database, columns, clock, "configs" in tables)
                return list(_read_mlflow(source, database, clock)) if "run_uuid" in columns else []
        except (sqlite3.Error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
            if str(error) == "interrupted" and not clock.is_over:  # SQLite swallows what its handler raises: Ctrl-C
                raise KeyboardInterrupt from None
            problem = f"no row within {QUERY_SECONDS:.0f} s" if clock.is_over else str(error)
    source.notes.append(f"{source.name} is damaged ({problem}).")
    return []


class _Clock:
    """Ends a query that gives no row for long, or more rows than the file has bytes."""

    def __init__(self, size: int) -> None:
        self.is_over = False
        self._last, self._left = time.monotonic(), size

    def tick(self) -> bool:
        self.is_over = time.monotonic() - self._last > QUERY_SECONDS
        return self.is_over

    def rows(self, rows: Iterable[tuple]) -> Iterator[tuple]:
        for row in rows:
            self._last, self._left = time.monotonic(), self._left - 1
            if self._left < 0:
                raise ValueError("it has more rows than bytes")
            yield row


def _tables(database: sqlite3.Connection) -> set[str] | None:
    """Return the tables that are read; None where one computes its rows."""
    names = "('metrics', 'configs', 'runs', 'params')"
    ours = database.execute(f"select name, type, rootpage from sqlite_master where lower(name) in {names}").fetchall()
    if not all(kind == "table" and page for _, kind, page in ours):
        return None
    columns = [column for name, *_ in ours for column in database.execute(f"pragma table_xinfo({name})")]
    return None if any(column[6] for column in columns) else {name for name, *_ in ours}


def _read_trackio(
    source: Source, database: sqlite3.Connection, columns: list[str], clock: _Clock, has_configs: bool
) -> list[Recording]:
    which = "run_id" if "run_id" in columns else "run_name"
    runs: dict[str, Recording] = {}
    found = database.execute(f"select {which}, run_name, step, metrics from metrics order by id")
    for key, name, step, text in clock.rows(found):
        run = runs.setdefault(key, Recording(source.name, "trackio", str(name)))
        try:
            values = numbers(parse_json(text))
        except (ValueError, TypeError, AttributeError):
            run.notes = [f"{source.name} has rows that cannot be read; they were left out."]
            continue
        if isinstance(step, int) and values:
            run.rows.append((step, values))
    for key, text in clock.rows(database.execute(f"select {which}, config from configs")) if has_configs else ():
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            run, settings = runs[key], flat(parse_json(text))
            run.config = {name: value for name, value in settings.items() if not name.startswith("_")}
    return list(runs.values())


def _read_mlflow(source: Source, database: sqlite3.Connection, clock: _Clock) -> Iterator[Recording]:
    names = dict(clock.rows(database.execute("select run_uuid, name from runs")))
    config: dict[str, dict[str, str]] = {}
    for run, key, value in clock.rows(database.execute("select run_uuid, key, value from params")):
        config.setdefault(run, {})[str(key)] = str(value)
    found = clock.rows(
        database.execute("select run_uuid, step, key, value, is_nan from metrics order by run_uuid, timestamp, step")
    )
    for run, rows in groupby(found, itemgetter(0)):
        known = ((as_step(number(step)), str(key), number("nan" if nan else v)) for _, step, key, v, nan in rows)
        triples = ((step, key, value) for step, key, value in known if step is not None and value is not None)
        made = gather(triples)
        if run in names:
            yield Recording(source.name, "MLflow", str(names[run] or run), "", made, _dotted(config.get(run, {})))


def is_mlflow_run(folder: Path) -> bool:
    """Return whether a folder is a run of MLflow's file store, or that run's ``metrics``, copied without the rest."""
    if folder.name != "metrics":
        return (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir()
    first = next((file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink()), None)
    if first is None:
        return False
    with first.open(encoding="utf-8", errors="replace") as lines:
        return re.fullmatch(r"\d{12,} \S+ \d+\s*", lines.readline(RECORD)) is not None


def read_mlflow_run(folder: Path) -> Recording:
    """Return a run of MLflow's file store: a file for each metric, ``time value step`` on each line."""
    values, notes = [], []
    metrics = folder if folder.name == "metrics" else folder / "metrics"
    for name, text in _files(metrics, folder).items():
        num_bad = 0
        for line in filter(str.strip, text.splitlines()):
            time, value, step = (*map(number, line.split()), None, None, None)[:3]
            known = as_step(step)
            if time is None or abs(time) >= 2**53 or value is None or known is None:
                num_bad += 1
            else:
                values.append((time, known, name, value))
        if num_bad:
            notes.append(f"GradLoc left out {plural(num_bad, 'line')} of {name} that it cannot read.")
    values.sort(key=lambda entry: entry[:2])
    rows = gather((step, metric, value) for _, step, metric, value in values)
    params = {name: text.strip() for name, text in _files(metrics.parent / "params", metrics.parent).items()}
    run = _files(metrics.parent / "tags", metrics.parent).get("mlflow.runName", "").strip()
    return Recording(folder.name, "MLflow", run, "", rows, _dotted(params), notes, folder=folder)


def _files(folder: Path, run: Path) -> dict[str, str]:
    """Return the texts of a folder's files by their names; none that a link leads to, nor out of the run."""
    return {
        file.relative_to(folder).as_posix(): read_bytes(file).decode("utf-8", errors="replace")
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.is_symlink() and is_inside(file, run)
    }


def _dotted(params: dict[str, str]) -> dict[str, str]:
    """verl logs its settings to MLflow by names with slashes."""
    return {name.replace("/", "."): value for name, value in params.items()}
