# SPDX-License-Identifier: Apache-2.0
"""Reads a checksum list as ``sha256sum`` writes it: ``<64 hex digits>  <name>`` per line.

Upper-case digits, CRLF and the ``*`` of binary mode are accepted: tools on Windows write them, and they mean nothing
else. Paths are not: a list speaks of its own folder.
"""

import re

from ..errors import GET_AGAIN, IntegrityError, UsageError, quoted

MAX_BYTES = 64 * 1024
_LINE = re.compile(r"([0-9A-Fa-f]{64}) [ *](\S.*)\Z")


def digest_for(name: str, data: bytes, path: str) -> str:
    """Returns the sha256 that the list ``data`` (from ``path``) gives for the file ``name``, which has no folder."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.strip():
        raise IntegrityError("sums-empty", f"the checksum file {path} is empty", "It was cut off.", GET_AGAIN)
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.match(line)
        at = f"line {number} of the checksum file {path}"
        if not match or len(data) > MAX_BYTES:
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


def check_hex(text: str) -> str:
    """Returns a digest given on the command line in lower case; raises if it is none."""
    if not re.fullmatch("[0-9A-Fa-f]{64}", text):
        what = "--sha256 is not 64 hex digits"
        raise UsageError("sums-hex", what, "It was cut when copied.", "Copy all 64 digits.", found=text[:80])
    return text.lower()
