# SPDX-License-Identifier: Apache-2.0
"""Read parsed JSON into the dataclasses of this package, for the report and the replay."""

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


class Misfit(ValueError):
    """A value is not of its type; ``path`` is where in the file, its last part first."""

    def __init__(self, expected: str, raw: Any):
        super().__init__(expected, raw)
        self.expected, self.found = expected, f"{raw!r:.80}"
        self.path: list[str] = []

    def __str__(self) -> str:
        where = "".join(reversed(self.path)).lstrip(".")
        if not self.expected:
            return f"{where} is missing"
        return f"{where or 'the file'} must be {self.expected}, found {self.found}"


def read(kind: type[T], raw: Any) -> T:
    """Turn parsed JSON into a dataclass.

    Fields that the class does not have are passed over; those that are missing take their default.

    Args:
        kind: a dataclass.
        raw: what ``json.loads`` returned.

    Raises:
        ValueError: names the field that is missing or of the wrong type.
    """
    return _reader(kind)[1](raw)  # type: ignore[arg-type]


Reader = Callable[[Any], Any]


@functools.cache  # an event has a hundred fields, and a run may have 100,000 events
def _reader(hint: Any) -> tuple[frozenset[type], Reader]:
    """Return the types of JSON values that a type takes unchanged, as most fields have one, and the function that
    converts others.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _reader(args[0])
    if origin in (typing.Union, types.UnionType):
        unchanged, inner = _reader(args[0])
        return unchanged | {types.NoneType}, lambda raw: None if raw is None else inner(raw)
    if hint is float or hint in _SIMPLE:
        return frozenset({hint}), _float if hint is float else functools.partial(_simple, hint)
    if is_dataclass(hint):
        return frozenset(), _object(hint)
    if origin is tuple:
        readers, is_any_length = [_reader(arg)[1] for arg in args if arg is not ...], args[-1] is ...
        return frozenset(), functools.partial(_tuple, readers, is_any_length and args[0])
    if origin is dict:
        return frozenset(), functools.partial(_dict, *_reader(args[1]))
    return frozenset(), lambda raw: raw


def _object(kind: Any) -> Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    parts = [
        (field.name, *_reader(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    ]
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    made_anew = [(field.name, field.default_factory) for field in fields(kind) if field.default_factory is not MISSING]
    upgrade = {Event: version1.event, SequenceFile: version1.sequences}.get(kind)

    def make(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise Misfit("an object", raw)
        if upgrade is not None and raw.get("schema_version", 1) == 1:
            raw = upgrade(raw)
        found, name = {**defaults}, ""
        try:
            for name, unchanged, read_field, is_required in parts:
                if name in raw:
                    value = raw[name]
                    found[name] = value if type(value) in unchanged else read_field(value)
                elif is_required:
                    raise Misfit("", None)
        except Misfit as error:
            error.path.append(f".{name}")
            raise
        for name, default in made_anew:
            if name not in found:
                found[name] = default()
        made = object.__new__(kind)  # a frozen dataclass's own constructor takes twice as long as all of this
        made.__dict__.update(found)
        return made

    return make


def _tuple(readers: list[Reader], item: Any, raw: Any) -> Any:
    """Read a list; ``item`` is the type of each where its length is free, else False."""
    if not isinstance(raw, list | tuple) or not item and len(raw) != len(readers):
        raise Misfit("a list" if item else f"a list of {len(readers)}", raw)
    if item and set(map(type, raw)) <= {item}:  # of a response's tokens there are many
        return tuple(raw)
    found = []
    try:
        for read_item, value in zip(readers * len(raw) if item else readers, raw, strict=True):
            found.append(read_item(value))
    except Misfit as error:
        error.path.append(f"[{len(found)}]")
        raise
    return tuple(found)


def _dict(unchanged: frozenset[type], inner: Reader, raw: Any) -> Any:
    if not isinstance(raw, dict):
        raise Misfit("an object", raw)
    if unchanged.issuperset(map(type, raw.values())):
        return raw
    found, key = {}, ""
    try:
        for key, value in raw.items():
            found[key] = inner(value)
    except Misfit as error:
        error.path.append(f".{key}")
        raise
    return found


def _float(raw: Any) -> float:
    if type(raw) is float:
        return raw
    if isinstance(raw, bool) or not (isinstance(raw, int) or raw in _SPELLED):
        raise Misfit("a number", raw)
    try:
        return float(raw)
    except OverflowError:
        raise Misfit("a number that a float can hold", raw) from None


def _simple(hint: type, raw: Any) -> Any:
    if not isinstance(raw, hint) or (hint is int and isinstance(raw, bool)):
        raise Misfit(_SIMPLE[hint], raw)
    return raw
