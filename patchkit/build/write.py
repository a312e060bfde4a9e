# SPDX-License-Identifier: Apache-2.0
"""Writes ``patches/`` from its sources, or checks that it is what would be written."""

import difflib
import os
from pathlib import Path

from ..errors import IntegrityError
from .compose import Folders, compose, read_sources

MAX_DIFF_LINES = 40


def build(folders: Folders, patches: Path, base: Path) -> list[str]:
    """Writes what differs into ``patches``; returns the names of the files written."""
    patches.mkdir(parents=True, exist_ok=True)
    written = []
    for name, data in compose(read_sources(folders), base, patches / "older").items():
        path = patches / name
        if not path.is_file() or path.read_bytes() != data:
            write_file(path, data)
            written.append(name)
    return written


def write_file(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def check(folders: Folders, patches: Path, base: Path) -> None:
    """Raises IntegrityError unless ``patches`` is, byte for byte, what a build would write."""
    expected = compose(read_sources(folders), base, patches / "older")
    for name, data in expected.items():
        path = patches / name
        found = path.read_bytes() if path.is_file() else b""
        if found != data:
            raise IntegrityError("build-stale", path=name, diff=_difference(name, found, data))
    known = {patches / name for name in expected} | set((patches / "older").glob("*.patch"))
    for path in sorted(patches.rglob("*")):
        if path not in known and not path.is_dir() and path.name not in (".gitkeep", "README.md"):
            raise IntegrityError("build-unlisted", path=path.relative_to(patches).as_posix())


def _difference(name: str, found: bytes, expected: bytes) -> list[str]:
    lines = difflib.unified_diff(
        found.decode("utf-8", "replace").splitlines(),
        expected.decode("utf-8", "replace").splitlines(),
        f"patches/{name}",
        f"built from the sources: {name}",
        lineterm="",
        n=1,
    )
    shown = [line for _, line in zip(range(MAX_DIFF_LINES + 1), lines, strict=False)]
    return shown[:MAX_DIFF_LINES] + (["..."] if len(shown) > MAX_DIFF_LINES else [])
