# SPDX-License-Identifier: Apache-2.0
"""Reads and writes ``patches/manifest.json``: every edition of the patch, file by file.

The reader takes exactly what the writer writes: unknown or missing keys, other types, numbers that
are not plain integers, deep nesting and oversized files are refused, with the place in the JSON.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import IntegrityError
from .digest import Digest
from .paths import check_path, check_path_set

SCHEMA_VERSION = 1
MAX_BYTES = 2**20
_HEX = {"sha256": re.compile(r"[0-9a-f]{64}\Z"), "blob": re.compile(r"[0-9a-f]{40}\Z")}
_FILE_NAME = re.compile(r"(older/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


@dataclass(frozen=True)
class FileChange:
    """What an edition does to one file; ``before`` is None for a file that it adds."""

    path: str
    before: Digest | None
    after: Digest


@dataclass(frozen=True)
class Edition:
    """One version of the patch: where its bytes are, and what it does to which files."""

    version: str
    patch_name: str
    patch_sha256: str
    patch_size: int
    files: tuple[FileChange, ...]


@dataclass(frozen=True)
class Manifest:
    """The pinned base and the editions for it; the first edition is the current one."""

    base_commit: str
    base_tag: str
    editions: tuple[Edition, ...]

    @property
    def current(self) -> Edition:
        return self.editions[0]


def render(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON: sorted keys, LF, the same bytes for the same content."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "base": {"commit": manifest.base_commit, "tag": manifest.base_tag},
        "editions": [
            {
                "version": edition.version,
                "patch": {
                    "name": edition.patch_name,
                    "sha256": edition.patch_sha256,
                    "size_bytes": edition.patch_size,
                },
                "files": [
                    {
                        "path": file.path,
                        "before": _render_digest(file.before),
                        "after": _render_digest(file.after),
                    }
                    for file in edition.files
                ],
            }
            for edition in manifest.editions
        ],
    }
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("ascii")


def _render_digest(digest: Digest | None) -> dict[str, Any] | None:
    if digest is None:
        return None
    return {"blob": digest.blob, "sha256": digest.sha256, "size_bytes": digest.size_bytes}


def load(path: Path) -> Manifest:
    """Returns the manifest at ``path``.

    Raises:
        IntegrityError: if it is missing, too large, not JSON, or not of this schema.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise IntegrityError("manifest-unreadable", path=str(path), found=error.strerror) from error
    return parse(data, path.name)


def parse(data: bytes, name: str = "manifest.json") -> Manifest:
    """Returns the manifest that ``data`` holds; ``name`` is for messages."""
    if len(data) > MAX_BYTES:
        raise IntegrityError("manifest-too-large", path=name, expected=f"at most {MAX_BYTES} bytes")
    reader = _Reader(name)
    document = reader.read_json(data)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise IntegrityError("manifest-future", path=name, expected=SCHEMA_VERSION, found=str(version)[:20])
    top = reader.fields(document, "$", schema_version=int, base=dict, editions=list)
    if top["schema_version"] != SCHEMA_VERSION:
        raise reader.wrong("$.schema_version", str(SCHEMA_VERSION), top["schema_version"])
    base = reader.fields(top["base"], "$.base", commit=str, tag=str)
    reader.match(_HEX["blob"], base["commit"], "$.base.commit", "40 hex digits")
    if not top["editions"]:
        raise reader.wrong("$.editions", "at least one edition", "none")
    editions = tuple(reader.edition(item, f"$.editions[{index}]") for index, item in enumerate(top["editions"]))
    return Manifest(base["commit"], base["tag"], editions)


class _Reader:
    """Checks a document piece by piece; every refusal names the place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wrong(self, where: str, expected: str, found: Any) -> IntegrityError:
        shown = found if isinstance(found, str) else json.dumps(found)
        return IntegrityError("manifest-schema", path=self.name, where=where, expected=expected, found=shown[:80])

    def read_json(self, data: bytes) -> Any:
        def refuse(text: str) -> None:
            raise IntegrityError("manifest-number", path=self.name, found=text[:40])

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            keys = [key for key, _ in items]
            repeated = next((key for key in keys if keys.count(key) > 1), None)
            if repeated is not None:
                raise IntegrityError("manifest-repeated-key", path=self.name, found=repeated[:40])
            return dict(items)

        def integer(text: str) -> int:
            return int(text) if len(text) < 16 else refuse(text)

        try:
            return json.loads(
                data.decode("utf-8"),
                parse_constant=refuse,
                parse_float=refuse,
                parse_int=integer,
                object_pairs_hook=pairs,
            )
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise IntegrityError("manifest-json", path=self.name, where=place, found=error.msg) from error
        except UnicodeDecodeError as error:
            raise IntegrityError(
                "manifest-json", path=self.name, where=f"byte {error.start}", found="not UTF-8"
            ) from error
        except RecursionError as error:
            raise IntegrityError("manifest-nesting", path=self.name) from error

    def fields(self, value: Any, where: str, **types: type) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(where, "an object", value)
        for key in value:
            if key not in types:
                raise self.wrong(f"{where}.{key}"[:120], "no such key", key)
        for key, kind in types.items():
            if key not in value:
                raise self.wrong(f"{where}.{key}", kind.__name__, "nothing")
            if type(value[key]) is not kind:
                raise self.wrong(f"{where}.{key}", kind.__name__, value[key])
        return value

    def match(self, pattern: re.Pattern[str], value: str, where: str, expected: str) -> str:
        if not pattern.match(value):
            raise self.wrong(where, expected, value)
        return value

    def edition(self, value: Any, where: str) -> Edition:
        item = self.fields(value, where, version=str, patch=dict, files=list)
        patch = self.fields(item["patch"], f"{where}.patch", name=str, sha256=str, size_bytes=int)
        self.match(_FILE_NAME, patch["name"], f"{where}.patch.name", "a plain file name")
        self.match(_HEX["sha256"], patch["sha256"], f"{where}.patch.sha256", "64 hex digits")
        files = tuple(self.file(entry, f"{where}.files[{index}]") for index, entry in enumerate(item["files"]))
        check_path_set([file.path for file in files])
        return Edition(item["version"], patch["name"], patch["sha256"], patch["size_bytes"], files)

    def file(self, value: Any, where: str) -> FileChange:
        # ``before`` is an object or null: take it out, so that fields() checks the rest.
        if not isinstance(value, dict) or "before" not in value:
            raise self.wrong(where, "an object with a 'before'", value)
        item = self.fields(
            {key: entry for key, entry in value.items() if key != "before"},
            where,
            path=str,
            after=dict,
        )
        check_path(item["path"])
        before = value["before"]
        return FileChange(
            item["path"],
            None if before is None else self.digest(before, f"{where}.before"),
            self.digest(item["after"], f"{where}.after"),
        )

    def digest(self, value: Any, where: str) -> Digest:
        item = self.fields(value, where, blob=str, sha256=str, size_bytes=int)
        for key, pattern in _HEX.items():
            self.match(pattern, item[key], f"{where}.{key}", "lower-case hex digits")
        return Digest(item["blob"], item["sha256"], item["size_bytes"])
