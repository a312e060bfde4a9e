# SPDX-License-Identifier: Apache-2.0
"""Which paths a patch may name: plain ASCII, relative, under ``verl/``, the same on every disk.

The rules are stricter than any one file system needs, so that no patch can mean different files
on different machines, reach into ``.git`` by one of its aliases, or leave the tree.
"""

import re
from collections.abc import Iterable

from ..errors import IntegrityError

PREFIX = "verl/"
MAX_LENGTH = 200
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+\Z")
_GIT_ALIAS = re.compile(r"(git~\d+|\.git([ .:].*)?)\Z", re.IGNORECASE)
_GIT_FILES = {".gitmodules", ".gitattributes", ".gitignore"}
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in "123456789"}


def problem_with(path: str) -> str | None:
    """Returns why ``path`` may not stand in a patch, or None if it may."""
    components = path.split("/")
    if any(_GIT_ALIAS.match(part) or part.lower() in _GIT_FILES for part in components):
        return "it reaches git's own files"
    if not _PLAIN.match(path):
        return "it has a character other than ASCII letters, digits, '_', '.', '-' and '/'"
    if path.startswith("/") or any(part in ("", ".", "..") for part in components):
        return "it is not a plain relative path"
    if any(part.endswith(".") for part in components):
        return "a part of it ends in a dot, which Windows drops"
    if any(part.split(".")[0].lower() in _DEVICES for part in components):
        return "a part of it is the name of a device on Windows"
    if len(path) > MAX_LENGTH:
        return f"it is longer than {MAX_LENGTH} characters"
    if not path.startswith(PREFIX):
        return f"it lies outside {PREFIX}"
    return None


def check_path(path: str, line: int | None = None) -> None:
    """Raises IntegrityError if ``path`` may not stand in a patch."""
    problem = problem_with(path)
    if problem:
        raise IntegrityError("path-unsafe", path=path, problem=problem, line=line)


def check_path_set(paths: Iterable[str]) -> None:
    """Raises IntegrityError if two paths collide: repeated, equal up to case, file and folder."""
    seen: dict[str, str] = {}
    for path in paths:
        if seen.get(path.casefold()) == path:
            raise IntegrityError("path-twice", path=path)
        if path.casefold() in seen:
            raise IntegrityError("path-case", path=path, other=seen[path.casefold()])
        seen[path.casefold()] = path
    for folded, path in seen.items():
        parts = folded.split("/")
        for depth in range(1, len(parts)):
            other = seen.get("/".join(parts[:depth]))
            if other:
                raise IntegrityError("path-file-and-folder", path=other, other=path)
