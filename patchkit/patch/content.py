# SPDX-License-Identifier: Apache-2.0
"""What identifies a file's content, what a text may hold, and how a file is read without being caught by it."""

import errno
import hashlib
import os
import stat
import unicodedata
from pathlib import Path

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
    """Returns the first control or format character of ``text`` as ``U+XXXX``, else None.

    Tab and line feed are fine. Bidirectional controls make code read other than it runs (CVE-2021-42574); zero-width
    characters and a BOM hide in names.
    """
    found = (char for char in text if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"))
    return next((f"U+{ord(char):04X}" for char in found), None)


def read_regular(path: Path, limit: int) -> bytes:
    """Returns the bytes of a plain file of at most ``limit`` bytes, or raises OSError; follows no link, awaits no pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise OSError(errno.EINVAL, f"not a plain file of at most {limit} bytes", str(path))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(handle)
