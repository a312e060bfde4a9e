# SPDX-License-Identifier: Apache-2.0
"""Parsed JSON as the dataclasses of this room: the one reader of the report and of a replay."""

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_SPELLED = ("NaN", "Infinity", "-Infinity")
_SIMPLE = {int: "an integer", bool: "true or false", str: "text"}


class _Wrong(Exception):
    """What is wrong, and the place as far as it is known, from the inside out."""

    def __init__(self, said: str, *where: str):
        self.said, self.where = said, [*where]

    def within(self, part: str) -> "_Wrong":
        self.where.append(part)
        return self


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
    try:
        return _reader(kind)(raw)  # type: ignore[arg-type]
    except _Wrong as error:
        place = (where + "".join(reversed(error.where))).lstrip(".")
        raise ValueError(f"{place or 'the file'} {error.said}") from None


@functools.cache  # an event has hundreds of fields, and a run may have 100,000 events
def _reader(hint: Any) -> Callable[[Any], Any]:
    """What turns a value of parsed JSON into one of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(args[0])
    if origin in (typing.Union, types.UnionType):
        inner = _reader(args[0])
        return lambda raw: None if raw is None else inner(raw)
    if is_dataclass(hint):
        return _object(hint)
    if origin is tuple:
        return _list(args[0]) if args[-1] is ... else functools.partial(_tuple, [*map(_reader, args)])
    if origin is dict:
        return functools.partial(_dict, _reader(args[1]))
    if hint is float:
        return _float
    return functools.partial(_simple, hint) if hint in _SIMPLE else lambda raw: raw


def _object(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    parts = [
        (field.name, _reader(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    ]

    def make(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise _wrong("an object", raw)
        found = {}
        for name, read_field, is_required in parts:
            if name in raw:
                try:
                    found[name] = read_field(raw[name])
                except _Wrong as error:
                    raise error.within(f".{name}") from None
            elif is_required:
                raise _Wrong("is missing", f".{name}")
        return kind(**found)

    return make


def _list(hint: Any) -> Callable[[Any], Any]:
    inner, simple = _reader(hint), {hint}

    def make(raw: Any) -> Any:
        if not isinstance(raw, list | tuple):
            raise _wrong("a list", raw)
        if set(map(type, raw)) <= simple:  # of a response's tokens there are many
            return tuple(raw)
        return _tuple([inner] * len(raw), raw)

    return make


def _tuple(readers: list[Callable[[Any], Any]], raw: Any) -> Any:
    if not isinstance(raw, list | tuple) or len(raw) != len(readers):
        raise _wrong(f"a list of {len(readers)}", raw)
    made: list[Any] = []
    try:
        made.extend(read_item(item) for read_item, item in zip(readers, raw, strict=True))
    except _Wrong as error:
        raise error.within(f"[{len(made)}]") from None
    return tuple(made)


def _dict(inner: Callable[[Any], Any], raw: Any) -> Any:
    if not isinstance(raw, dict):
        raise _wrong("an object", raw)
    made: dict[str, Any] = {}
    for key, item in raw.items():
        try:
            made[key] = inner(item)
        except _Wrong as error:
            raise error.within(f".{key}") from None
    return made


def _float(raw: Any) -> float:
    if type(raw) is float:
        return raw
    if isinstance(raw, bool) or not (isinstance(raw, int | float) or raw in _SPELLED):
        raise _wrong("a number", raw)
    try:
        return float(raw)
    except OverflowError:
        raise _wrong("a number that a float can hold", raw) from None


def _simple(hint: type, raw: Any) -> Any:
    if not isinstance(raw, hint) or (hint is int and isinstance(raw, bool)):
        raise _wrong(_SIMPLE[hint], raw)
    return raw


def _wrong(expected: str, raw: Any) -> _Wrong:
    return _Wrong(f"must be {expected}, found {raw!r:.80}")
