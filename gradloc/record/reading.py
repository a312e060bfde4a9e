# SPDX-License-Identifier: Apache-2.0
"""Parsed JSON as the dataclasses of this room: the one reader of the report and of a replay."""

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from . import Event, version1
from .bundle import SequenceFile

T = TypeVar("T")
_SPELLED = ("NaN", "Infinity", "-Infinity")
_SIMPLE = {int: "an integer", bool: "true or false", str: "text"}


def read(kind: type[T], raw: Any, where: str = "") -> T:
    """Turn parsed JSON into a dataclass.

    Fields that the class does not have are passed over; those that are missing take their default.

    Args:
        kind: a dataclass.
        raw: what ``json.loads`` returned.
        where: dotted path of ``raw`` in its file.

    Raises:
        ValueError: names the field that is missing or of the wrong type.
    """
    return _reader(kind)(raw, where)  # type: ignore[arg-type]


Reader = Callable[[Any, str], Any]


@functools.cache  # an event has hundreds of fields, and a run may have 100,000 events
def _reader(hint: Any) -> Reader:
    """What turns a value of parsed JSON, and where it was, into one of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(args[0])
    if origin in (typing.Union, types.UnionType):
        inner = _reader(args[0])
        return lambda raw, where: None if raw is None else inner(raw, where)
    if is_dataclass(hint):
        return _object(hint)
    if origin is tuple:
        is_any_length = args[-1] is ...
        return functools.partial(_tuple, [_reader(arg) for arg in args if arg is not ...], is_any_length and args[0])
    if origin is dict:
        return functools.partial(_dict, _reader(args[1]))
    if hint is float:
        return _float
    return functools.partial(_simple, hint) if hint in _SIMPLE else lambda raw, where: raw


def _object(kind: Any) -> Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    parts = [
        (field.name, _reader(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    ]
    upgrade = {Event: version1.event, SequenceFile: version1.sequences}.get(kind)

    def make(raw: Any, where: str) -> Any:
        if not isinstance(raw, dict):
            raise _wrong(where, "an object", raw)
        if upgrade is not None and raw.get("schema_version", 1) == 1:
            raw = upgrade(raw)
        found = {}
        for name, read_field, is_required in parts:
            if name in raw:
                found[name] = read_field(raw[name], f"{where}.{name}")
            elif is_required:
                raise ValueError(f"{f'{where}.{name}'.lstrip('.')} is missing")
        return kind(**found)

    return make


def _tuple(readers: list[Reader], item: Any, raw: Any, where: str) -> Any:
    """``item``: the type of each, where there may be any number; else False."""
    if not isinstance(raw, list | tuple) or not item and len(raw) != len(readers):
        raise _wrong(where, "a list" if item else f"a list of {len(readers)}", raw)
    if item and set(map(type, raw)) <= {item}:  # of a response's tokens there are many
        return tuple(raw)
    pairs = enumerate(zip(readers * len(raw) if item else readers, raw, strict=True))
    return tuple(read_item(value, f"{where}[{number}]") for number, (read_item, value) in pairs)


def _dict(inner: Reader, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise _wrong(where, "an object", raw)
    return {key: inner(item, f"{where}.{key}") for key, item in raw.items()}


def _float(raw: Any, where: str) -> float:
    if isinstance(raw, bool) or not (isinstance(raw, int | float) or raw in _SPELLED):
        raise _wrong(where, "a number", raw)
    try:
        return float(raw)
    except OverflowError:
        raise _wrong(where, "a number that a float can hold", raw) from None


def _simple(hint: type, raw: Any, where: str) -> Any:
    if not isinstance(raw, hint) or (hint is int and isinstance(raw, bool)):
        raise _wrong(where, _SIMPLE[hint], raw)
    return raw


def _wrong(where: str, expected: str, raw: Any) -> ValueError:
    return ValueError(f"{where.lstrip('.') or 'the file'} must be {expected}, found {raw!r:.80}")
