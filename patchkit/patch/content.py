# SPDX-License-Identifier: Apache-2.0
"""What a patch may name and hold: paths that mean the same on every disk, ids of content, no hidden characters."""

import errno
import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from ..errors import BUILT, DO_NOT_USE, NOT_OURS, IntegrityError

PREFIX = "verl/"
MAX_LENGTH = 200
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+\Z")
_GIT = re.compile(r"(git~\d+|\.git([ .:].*)?|\.gitmodules|\.gitattributes|\.gitignore)\Z", re.IGNORECASE)
_DEVICE = re.compile(r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?\Z", re.IGNORECASE)
ABSENT = "0" * 40
"""How an ``index`` line of a patch writes "no file"."""


def sha256_hex(data: bytes) -> str:
    """Returns the sha256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """Returns git's id for ``data`` as a file's content, as ``git hash-object`` prints it: sha1, length included."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def short(blob: str | None) -> str:
    """Returns a blob id, or its absence, for a message."""
    return f"git blob {blob[:12]}" if blob else "no file"


def hidden_character(text: str) -> str | None:
    """Returns the first control or format character of ``text`` as ``U+XXXX`` (CVE-2021-42574), else None."""
    found = (char for char in text if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"))
    return next((f"U+{ord(char):04X}" for char in found), None)


def read_regular(path: Path, limit: int) -> bytes:
    """Returns the bytes of a plain file of at most ``limit`` bytes, or raises OSError; no link, no pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise OSError(errno.EINVAL, f"not a plain file of at most {limit} bytes", str(path))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(handle)


def problem_with(path: str) -> str | None:
    """Returns why ``path`` may not stand in a patch, or None if it may."""
    components = path.split("/")
    if any(map(_GIT.match, components)):
        return "it reaches git's own files"
    if not _PLAIN.match(path):
        return "it has a character other than ASCII letters, digits, '_', '.', '-' and '/'"
    if path.startswith("/") or any(part in ("", ".", "..") for part in components):
        return "it is not a plain relative path"
    if any(part.endswith(".") for part in components):
        return "a part of it ends in a dot, which Windows drops"
    if any(map(_DEVICE.match, components)):
        return "a part of it is the name of a device on Windows"
    if len(path) > MAX_LENGTH:
        return f"it is longer than {MAX_LENGTH} characters"
    return None if path.startswith(PREFIX) else f"it lies outside {PREFIX}"


def check_path(path: str) -> None:
    """Raises IntegrityError if ``path`` may not stand in a patch."""
    problem = problem_with(path)
    if problem:
        what = f"the path {path!r} may not stand in a patch: {problem}"
        cause = "The patch was made for another tree, or by someone who means harm."
        raise IntegrityError("path-unsafe", what, cause, DO_NOT_USE, path=path)


def check_path_set(paths: Iterable[str]) -> None:
    """Raises IntegrityError if two paths collide: repeated, equal up to case, file and folder."""
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.get(path.casefold())
        if other == path:
            raise IntegrityError("path-twice", f"{path} occurs twice", NOT_OURS, BUILT, path=path)
        if other:
            what = f"{path} and {other} differ in case only"
            raise IntegrityError("path-case", what, "On some disks they are one file.", BUILT, path=path)
        seen[path.casefold()] = path
    for folded, path in seen.items():
        parts = folded.split("/")
        for depth in range(1, len(parts)):
            other = seen.get("/".join(parts[:depth]))
            if other:
                what = f"{other} is both a file and the folder of {path}"
                raise IntegrityError("path-file-and-folder", what, NOT_OURS, BUILT, path=other)
