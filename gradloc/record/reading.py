# SPDX-License-Identifier: Apache-2.0
"""Parsed JSON as the dataclasses of this room: the one reader of the report and of a replay."""

import functools
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_SPELLED = ("NaN", "Infinity", "-Infinity")
_SIMPLE = {int: "an integer", bool: "true or false", str: "text"}
_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


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
    if not isinstance(raw, dict):
        raise _wrong(where, "an object", raw)
    found, hints = {}, _hints(kind)  # type: ignore[arg-type]
    for field in fields(kind):  # type: ignore[arg-type]
        path = f"{where}.{field.name}".lstrip(".")
        if field.name in raw:
            found[field.name] = _value(hints[field.name], raw[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return kind(**found)


def _value(hint: Any, raw: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _value(args[0], raw, where)
    if origin in (typing.Union, types.UnionType):
        return None if raw is None else _value(args[0], raw, where)
    if is_dataclass(hint):
        return read(hint, raw, where)  # type: ignore[arg-type]
    if origin is tuple:
        return _tuple(args, raw, where)
    if origin is dict:
        if not isinstance(raw, dict):
            raise _wrong(where, "an object", raw)
        return {key: _value(args[1], item, f"{where}.{key}") for key, item in raw.items()}
    if hint is float:
        if isinstance(raw, bool) or not (isinstance(raw, int | float) or raw in _SPELLED):
            raise _wrong(where, "a number", raw)
        try:
            return float(raw)
        except OverflowError:
            raise _wrong(where, "a number that a float can hold", raw) from None
    if hint in _SIMPLE and (not isinstance(raw, hint) or (hint is int and isinstance(raw, bool))):
        raise _wrong(where, _SIMPLE[hint], raw)
    return raw


def _tuple(args: tuple[Any, ...], raw: Any, where: str) -> tuple[Any, ...]:
    kinds = args[:1] * len(raw) if args[-1] is ... and isinstance(raw, list | tuple) else args
    if not isinstance(raw, list | tuple) or len(raw) != len(kinds):
        raise _wrong(where, "a list" if args[-1] is ... else f"a list of {len(args)}", raw)
    if args[-1] is ... and set(map(type, raw)) <= {args[0]}:  # of a response's tokens there are many
        return tuple(raw)
    pairs = enumerate(zip(kinds, raw, strict=True))
    return tuple(_value(kind, item, f"{where}[{number}]") for number, (kind, item) in pairs)


def _wrong(where: str, expected: str, raw: Any) -> ValueError:
    return ValueError(f"{where or 'the file'} must be {expected}, found {raw!r:.80}")
