# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ``patches/manifest.json``: the version, and for each verl its patch with sha256 and size.

The reader takes exactly what the writer writes: unknown or missing keys, other types, numbers that are not plain
integers, deep nesting and oversized files are refused, with the place in the JSON.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import RESTORE, IntegrityError

SCHEMA_VERSION = 2
MAX_BYTES = 2**20
VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}\Z")
ENTRY = {
    "base": re.compile(r"v\d+\.\d+\.\d+[a-z0-9.]*\Z"),
    "commit": re.compile(r"[0-9a-f]{40}\Z"),
    "name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"),
    "sha256": re.compile(r"[0-9a-f]{64}\Z"),
    "size_bytes": int,
}
_EDITED = "It was cut off or edited by hand; it is generated."


@dataclass(frozen=True)
class Base:
    """A verl that there is a patch for."""

    tag: str
    commit: str

    def is_said_by(self, version: str) -> bool:
        """True if ``verl/version/version`` says ``version`` in this verl: a tag's commit may still say ``.dev``."""
        return version.removesuffix(".dev") == self.tag.removeprefix("v")


@dataclass(frozen=True)
class Entry:
    """The patch for one verl."""

    base: Base
    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """One version of the patch, for each verl; the first is the one that everything else is made from."""

    version: str
    entries: tuple[Entry, ...]


def render(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON: sorted keys, LF, the same bytes for the same content."""
    values = ((e.base.tag, e.base.commit, e.name, e.sha256, e.size_bytes) for e in manifest.entries)
    entries = [dict(zip(ENTRY, value, strict=True)) for value in values]
    document = {"schema_version": SCHEMA_VERSION, "version": manifest.version, "patches": entries}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("ascii")


def parse(data: bytes, name: str = "manifest.json") -> Manifest:
    """Returns the manifest that ``data`` holds; ``name`` is for messages."""
    document = read_json(data, name)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        what, cause = f"{name} has a schema that is newer than this tool", "patches/ and the tool are of two versions."
        raise IntegrityError("manifest-future", what, cause, "git pull", expected=SCHEMA_VERSION, found=version)
    top = fields(document, "$", name, schema_version=int, version=VERSION, patches=list)
    if version != SCHEMA_VERSION or not top["patches"]:
        where = "$.schema_version" if top["patches"] else "$.patches"
        raise wrong(name, where, f"schema {SCHEMA_VERSION} with patches", version)
    read = (fields(item, f"$.patches[{index}]", name, **ENTRY) for index, item in enumerate(top["patches"]))
    entries = (Entry(Base(e["base"], e["commit"]), e["name"], e["sha256"], e["size_bytes"]) for e in read)
    return Manifest(top["version"], tuple(entries))


def wrong(name: str, where: str, expected: str, found: Any) -> IntegrityError:
    """Returns the refusal of a JSON value."""
    what, shown = f"{name} is wrong at {where[:120]}", found if isinstance(found, str) else json.dumps(found)
    return IntegrityError("manifest-schema", what, _EDITED, RESTORE, expected=expected, found=shown[:80])


def read_json(data: bytes, name: str) -> Any:
    """Returns the JSON value in ``data``, of which only what ``render`` can write is taken."""

    def refuse(what: str, found: str) -> NoReturn:
        raise IntegrityError("manifest-value", f"{name} {what}", _EDITED, RESTORE, found=found[:40])

    def number(text: str) -> int:
        return int(text) if text.isdigit() and len(text) < 16 else refuse("holds a number that is no integer", text)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        return dict(items) if repeated is None else refuse("has a key twice", repeated)

    if len(data) > MAX_BYTES:
        refuse("is too large", f"{len(data)} bytes")
    try:
        text, numbers = data.decode("utf-8"), dict.fromkeys(("parse_constant", "parse_float", "parse_int"), number)
        return json.loads(text, object_pairs_hook=pairs, **numbers)
    except RecursionError:
        refuse("is nested too deeply", "")
    except ValueError as error:  # of JSON and of UTF-8
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)[-60:]
        what = f"{name} is not JSON at {where}"
        raise IntegrityError("manifest-json", what, _EDITED, RESTORE, found=str(error)[:80]) from error


def fields(value: Any, where: str, name: str, /, **kinds: Any) -> dict[str, Any]:
    """Returns the object ``value``, whose keys must be those of ``kinds``: a type, or a pattern for a string."""
    if not isinstance(value, dict):
        raise wrong(name, where, "an object", value)
    for key in value.keys() ^ kinds.keys():
        raise wrong(name, f"{where}.{key}", "this key" if key in kinds else "no such key", value.get(key, "nothing"))
    for key, kind in kinds.items():
        is_type = isinstance(kind, type)
        if type(value[key]) is not (kind if is_type else str) or not (is_type or kind.match(value[key])):
            expected = kind.__name__ if is_type else f"text like {kind.pattern}"
            raise wrong(name, f"{where}.{key}", expected, value[key])
    return value
