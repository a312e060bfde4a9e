# SPDX-License-Identifier: Apache-2.0
"""Reads a checksum list as ``sha256sum`` writes it: ``<64 hex digits>  <name>`` per line.

Upper-case digits, CRLF and the ``*`` of binary mode are accepted: tools on Windows write them, and
they mean nothing else. Paths are not: a list speaks of its own folder.
"""

import re

from ..errors import IntegrityError, UsageError

MAX_BYTES = 64 * 1024
_LINE = re.compile(r"([0-9A-Fa-f]{64}) [ *](\S.*)\Z")
_HEX = re.compile(r"[0-9A-Fa-f]{64}\Z")


def digest_for(name: str, data: bytes, path: str) -> str:
    """Returns the sha256 that the list ``data`` gives for the file ``name``.

    Args:
        name: the file's name, without a folder.
        data: the list.
        path: where the list is from, for messages.
    """
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.strip():
        raise IntegrityError("sums-empty", path=path)
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.match(line)
        if not match or len(data) > MAX_BYTES:
            raise IntegrityError("sums-line", path=path, line=number, found=line[:80])
        listed = match[2]
        if "/" in listed or "\\" in listed or listed in (".", ".."):
            raise IntegrityError("sums-path", path=path, line=number, found=listed, name=name)
        if listed in digests:
            raise IntegrityError("sums-duplicate", path=path, line=number, name=listed)
        digests[listed] = match[1].lower()
    if name not in digests:
        found = ", ".join(sorted(digests))[:80]
        raise IntegrityError("sums-unnamed", path=path, name=name, found=found)
    return digests[name]


def check_hex(text: str) -> str:
    """Returns a digest given on the command line in lower case; raises if it is none."""
    if not _HEX.match(text):
        raise UsageError("sums-hex", found=text[:80])
    return text.lower()
