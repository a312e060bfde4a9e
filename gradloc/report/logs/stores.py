# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard, W&B and SwanLab write while a run goes on, read as bytes: none of the three need be installed.

All three are streams of records with a length before each, a record being a protocol buffer. A run that was killed
leaves its last record cut off; everything before it is whole.
"""

import json
import re
import struct
from collections.abc import Iterator
from typing import Any

from .names import numbers
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
_TENSORS = {1: ("<f", 4), 2: ("<d", 8)}  # TensorFlow's DT_FLOAT and DT_DOUBLE


def is_tensorboard(source: Source) -> bool:
    """Whether the first record is an event with a time."""
    head = source.head
    return ".tfevents." in source.name or (
        source.is_binary and len(head) > 21 and head[4:8] == b"\0\0\0\0" and head[12:13] == b"\x09" and head[0] < 64
    )


def read_tensorboard(source: Source) -> list[Recording]:
    """Scalars of one event file."""
    found = Recording(source.name, "TensorBoard")
    found.rows = gather(_scalars(_framed(source.read())))
    found.notes = source.notes
    return [found] if found.rows else []


def _framed(content: bytes) -> Iterator[bytes]:
    """TFRecord: a length of 8 bytes, its checksum of 4, the record, its checksum of 4."""
    at, end = 0, len(content)
    while at + 12 <= end:
        length = int.from_bytes(content[at : at + 8], "little")
        if at + 12 + length > end:
            return
        yield content[at + 12 : at + 12 + length]
        at += 16 + length


def _scalars(records: Iterator[bytes]) -> Iterator[tuple[int, str, float]]:
    names: dict[bytes, str] = {}
    steps: dict[bytes, int] = {}
    for record in records:
        plain = _SCALAR.fullmatch(record)
        if plain is not None and len(plain[3]) == plain[2][0]:
            code, _, tag, value = plain.groups()
            if code not in steps:
                steps[code] = _varint(code, 0)[0]
            yield steps[code], names.get(tag) or names.setdefault(tag, _text(tag)), _FLOAT.unpack(value)[0]
            continue
        step, summary = 0, None
        for field, value in fields(record):
            if field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                summary = value
        for field, item in fields(summary or b""):
            if field != 1 or not isinstance(item, bytes):
                continue
            tag, found = b"", None
            for inner, value in fields(item):
                if inner == 1 and isinstance(value, bytes):
                    tag = value
                elif inner == 2 and isinstance(value, bytes) and len(value) == 4:
                    found = _FLOAT.unpack(value)[0]
                elif inner == 8 and isinstance(value, bytes):
                    found = _tensor(value)
            if found is not None and tag:
                yield step, names.setdefault(tag, _text(tag)), found


def _tensor(content: bytes) -> float | None:
    """The number of a tensor that holds one, as TensorFlow 2 writes scalars."""
    made = dict(fields(content))
    kind = _TENSORS.get(made.get(1))
    if kind is None:
        return None
    value = next((made[field] for field in (4, 5, 6) if isinstance(made.get(field), bytes)), b"")
    return struct.unpack(kind[0], value)[0] if len(value) == kind[1] else None


def is_wandb(source: Source) -> bool:
    return source.head.startswith(b":W&B")


def read_wandb(source: Source) -> list[Recording]:
    """History and configuration of a ``run-*.wandb`` file."""
    found = Recording(source.name, "W&B's local run")
    for record in _logged(source.read()):
        for field, value in fields(record):
            if not isinstance(value, bytes):
                continue
            if field == 2:
                _take_history(found, value)
            elif field == 17:
                said = dict(fields(value))
                found.run = _text(said.get(8)) or found.run
                _take_config(found, said.get(4))
            elif field == 5:
                _take_config(found, value)
    found.notes = source.notes
    return [found] if found.rows else []


def _take_history(found: Recording, content: bytes) -> None:
    row, step = {}, None
    for field, value in fields(content):
        if field == 1 and isinstance(value, bytes):
            key, said = _item(value)
            if key == "_step" and isinstance(said, int | float):
                step = int(said)
            else:
                row.update(numbers({key: said}))
        elif field == 2 and isinstance(value, bytes):
            step = dict(fields(value)).get(1, step)
    own = next((row[name] for name in ("train/global_step", "trainer/global_step") if name in row), step)
    if own is not None and row:
        found.rows.append((int(own), row))


def _take_config(found: Recording, content: Any) -> None:
    for field, value in fields(content if isinstance(content, bytes) else b""):
        if field == 1 and isinstance(value, bytes):
            key, said = _item(value)
            if key and not key.startswith("_"):
                found.config.update(flat(said, key))


def _item(content: bytes) -> tuple[str, Any]:
    """A key, which may be nested, and its value in JSON."""
    keys, nested, value = [], [], None
    for field, found in fields(content):
        if field == 1:
            keys.append(_text(found))
        elif field == 2:
            nested.append(_text(found))
        elif field == 16:
            try:
                value = json.loads(_text(found))
            except ValueError:
                value = None
    return "/".join([*keys, *nested]), value


def is_swanlab(source: Source) -> bool:
    return source.head.startswith(b":SWL")


def read_swanlab(source: Source) -> list[Recording]:
    """Scalars of a ``run-*.swanlab`` file."""
    triples = []
    found = Recording(source.name, "SwanLab's local run")
    for record in _logged(source.read()):
        for field, value in fields(record):
            if field == 10 and isinstance(value, bytes):
                found.run = _text(dict(fields(value)).get(4)) or found.run
            elif field == 13 and isinstance(value, bytes):
                said = dict(fields(value))
                inner = dict(fields(said[5])) if isinstance(said.get(5), bytes) else {}
                number = inner.get(1)
                if isinstance(number, bytes) and len(number) == 8 and isinstance(said.get(2), int):
                    triples.append((said[2], _text(said.get(1)), _DOUBLE.unpack(number)[0]))
    found.rows, found.notes = gather(triples), source.notes
    return [found] if found.rows else []


def _logged(content: bytes) -> Iterator[bytes]:
    """LevelDB's log after a head of 7 bytes: blocks of 32 KiB, a record in one part or several."""
    at, parts = _HEADER, []
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        part = content[at + _HEADER : at + _HEADER + length]
        if kind not in (1, 2, 3, 4) or len(part) < length:
            at += left  # what is damaged costs its block
            parts = []
            continue
        at += _HEADER + length
        parts = [part] if kind in (1, 2) else [*parts, part]
        if kind in (1, 4):
            yield b"".join(parts)


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: numbers, and bytes as they are. What is damaged ends it."""
    at, end = 0, len(content)
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
