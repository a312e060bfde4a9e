# SPDX-License-Identifier: Apache-2.0
"""What says what a patch must be: ``manifest.json``, checksum lists, and ``history.json`` for the releases of the past.

The readers of our own files take exactly what the writers write. By the history a tree that has an old release is known
and taken back to verl without that release's patch: it has the ids of all files, and verl's lines that were replaced.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import GET_AGAIN, RESTORE, IntegrityError, quoted
from .content import check_path_set, problem_with, sha256_hex
from .language import FilePatch, cuts
from .language import parse as parse_patch

SCHEMA_VERSION = 2
MAX_BYTES = 2**20
VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}\Z")
ENTRY: dict[str, Any] = {
    "base": re.compile(r"v\d+\.\d+\.\d+[a-z0-9.]*\Z"),
    "commit": re.compile(r"[0-9a-f]{40}\Z"),
    "name": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"),
    "sha256": re.compile(r"[0-9a-f]{64}\Z"),
    "size_bytes": int,
}
MAX_LIST_BYTES = 64 * 1024
_LINE = re.compile(r"([0-9A-Fa-f]{64}) [ *](\S.*)\Z")
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
        text = data.decode("utf-8")
        return json.loads(text, parse_constant=number, parse_float=number, parse_int=number, object_pairs_hook=pairs)
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


def digest_for(name: str, data: bytes, path: str) -> str:
    """Returns the sha256 that the list ``data`` (from ``path``) gives for the file ``name``, which has no folder."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.strip():
        raise IntegrityError("sums-empty", f"the checksum file {path} is empty", "It was cut off.", GET_AGAIN)
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.match(line)
        at = f"line {number} of the checksum file {path}"
        if not match or len(data) > MAX_LIST_BYTES:
            what, cause = f"{at} is not '<64 hex digits>  <name>'", "It is not a list that sha256sum wrote."
            raise IntegrityError("sums-line", what, cause, GET_AGAIN, found=line[:80])
        listed = match[2]
        if "/" in listed or "\\" in listed or listed in (".", ".."):
            cause = "The list was made from another folder, or by someone who means harm."
            next_ = f"Make it again beside the patch: sha256sum {quoted(name)} > {quoted(name)}.sha256"
            raise IntegrityError("sums-path", f"{at} names a path outside its folder", cause, next_, found=listed)
        if listed in digests:
            what = f"the checksum file {path} names {listed} twice"
            raise IntegrityError("sums-duplicate", what, "Two lists were joined.", "Keep the author's line.")
        digests[listed] = match[1].lower()
    if name not in digests:
        what, next_ = f"the checksum file {path} has no line for {name}", "Name the right list, or --sha256 HEX."
        raise IntegrityError("sums-unnamed", what, "It belongs to another file.", next_, found=", ".join(digests)[:80])
    return digests[name]


@dataclass(frozen=True)
class Edition:
    """What one version does to which files of the verl with the tag ``base``.

    ``patch`` is None for a release of which only the way back is known.
    """

    version: str
    base: str
    sha256: str
    files: dict[str, FilePatch]
    patch: bytes | None = None

    @classmethod
    def of(cls, patch: bytes, version: str, base: str) -> "Edition":
        """Returns the edition with the patch ``patch``; raises IntegrityError if it is outside the language."""
        return cls(version, base, sha256_hex(patch), {file.path: file for file in parse_patch(patch)}, patch)

    def shares_base(self, other: "Edition") -> bool:
        """True if no file says that the two are for different verls."""
        pairs = ((file.before, other.files[path].before) for path, file in self.files.items() if path in other.files)
        return all(mine == theirs for mine, theirs in pairs)


def remember(edition: Edition, history: bytes) -> bytes:
    """Returns ``history`` (``history.json``, or nothing) with the release ``edition`` in it."""
    known = [one for one in recall(history) if (one.version, one.base) != (edition.version, edition.base)]
    releases = [
        {
            "version": release.version,
            "base": release.base,
            "sha256": release.sha256,
            "added": {path: file.after for path, file in release.files.items() if file.before is None},
            "edited": {
                path: {"before": file.before, "after": file.after, "back": file.cuts or cuts(file)}
                for path, file in release.files.items()
                if file.before is not None
            },
        }
        for release in [*known, edition]
    ]
    return (json.dumps({"releases": releases}, indent=0, sort_keys=True) + "\n").encode("ascii")


def recall(history: bytes) -> list[Edition]:
    """Returns the releases that ``history.json`` knows; raises IntegrityError where it is not what it should be."""
    name, editions = "history.json", []
    listed = fields(read_json(history, name), "$", name, releases=list)["releases"] if history else []
    for index, item in enumerate(listed):
        where = f"$.releases[{index}]"
        fields(item, where, name, version=VERSION, base=ENTRY["base"], sha256=ENTRY["sha256"], added=dict, edited=dict)
        files = {path: FilePatch(path, None, after) for path, after in item["added"].items()}
        for path, change in item["edited"].items():
            change = fields(change, f"{where}.{path}", name, before=str, after=str, back=list)
            try:
                back = tuple((int(at), int(count), tuple(base)) for at, count, base in change["back"])
            except (TypeError, ValueError):
                raise wrong(name, f"{where}.{path}.back", "lines of the base", change["back"]) from None
            files[path] = FilePatch(path, change["before"], change["after"], cuts=back)
        for path, file in files.items():
            ids = (str(file.before or file.after), str(file.after))
            if problem_with(path) or not all(map(ENTRY["commit"].match, ids)):
                raise wrong(name, f"{where}.{path}", "ids of a file under verl/", file.after)
        check_path_set(files)
        editions.append(Edition(item["version"], item["base"], item["sha256"], files))
    return editions
