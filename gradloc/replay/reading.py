# SPDX-License-Identifier: Apache-2.0
"""Parsed JSON as the dataclasses of :mod:`..record`, with the standard library alone."""

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_SPELLED = ("NaN", "Infinity", "-Infinity")
_SIMPLE = {int: "an integer", bool: "true or false", str: "text"}


class ReplayError(Exception):
    """The event cannot be replayed from what was given; the message is one sentence for whoever gave it."""


def read(kind: type[T], raw: Any, where: str = "") -> T:
    """Turn parsed JSON into a dataclass.

    Fields that the class does not have are passed over; those that are missing take their default.

    Args:
        kind: a dataclass.
        raw: what ``json.loads`` returned.
        where: dotted path of ``raw`` in ``meta.json``.

    Raises:
        ReplayError: names the field that is missing or of the wrong type.
    """
    if not isinstance(raw, dict):
        raise _wrong(where, "an object", raw)
    hints, found = typing.get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        path = f"{where}.{field.name}".lstrip(".")
        if field.name in raw:
            found[field.name] = _value(hints[field.name], raw[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ReplayError(f"meta.json: {path} is missing; docs/bundle.md says what a bundle holds.")
    return kind(**found)


def _value(hint: Any, raw: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _value(args[0], raw, where)
    if origin in (typing.Union, types.UnionType):
        return None if raw is None else _value(args[0], raw, where)
    if is_dataclass(hint):
        return read(hint, raw, where)
    if origin is tuple:
        kinds = args[:1] * len(raw) if args[-1] is ... and isinstance(raw, list) else args
        if not isinstance(raw, list) or len(raw) != len(kinds):
            raise _wrong(where, "a list" if args[-1] is ... else f"a list of {len(args)}", raw)
        return tuple(
            _value(kind, item, f"{where}[{number}]") for number, (kind, item) in enumerate(zip(kinds, raw, strict=True))
        )
    if origin is dict:
        if not isinstance(raw, dict):
            raise _wrong(where, "an object", raw)
        return {key: _value(args[1], item, f"{where}.{key}") for key, item in raw.items()}
    if hint is float:
        if isinstance(raw, bool) or not (isinstance(raw, int | float) or raw in _SPELLED):
            raise _wrong(where, "a number", raw)
        return float(raw)
    if hint in _SIMPLE and (not isinstance(raw, hint) or (hint is int and isinstance(raw, bool))):
        raise _wrong(where, _SIMPLE[hint], raw)
    return raw


def _wrong(where: str, expected: str, raw: Any) -> ReplayError:
    return ReplayError(f"meta.json: {where or 'the file'} must be {expected}, found {raw!r:.80}.")
