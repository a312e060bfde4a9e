# SPDX-License-Identifier: Apache-2.0
"""Names what a file that is not one of our patches looks like, so that a refusal can help."""

from ..errors import IntegrityError

_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_SPECIAL_HEADERS = (
    ("new file mode 120000", "type-symlink"),
    ("new file mode 160000", "type-gitlink"),
    ("new file mode ", "mode-refused"),
    ("old mode ", "mode-refused"),
    ("new mode ", "mode-refused"),
    ("deleted file mode ", "patch-deletes"),
    ("similarity index ", "patch-renames"),
    ("dissimilarity index ", "patch-renames"),
    ("rename ", "patch-renames"),
    ("copy ", "patch-renames"),
    ("GIT binary patch", "patch-binary"),
    ("Binary files ", "patch-binary"),
)


def check_bytes(data: bytes) -> None:
    """Raises IntegrityError unless ``data`` is non-empty UTF-8 text with LF and a final newline."""
    if not data:
        raise IntegrityError("patch-empty")
    for magic, kind in _COMPRESSED.items():
        if data.startswith(magic):
            raise IntegrityError("patch-compressed", kind=kind)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or data[1:2] == b"\0" or data[:1] == b"\0":
        raise IntegrityError("patch-utf16")
    if data.startswith(b"\xef\xbb\xbf"):
        raise IntegrityError("patch-bom")
    if data.lstrip()[:64].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise IntegrityError("patch-html")
    for byte, reason in ((b"\0", "patch-nul"), (b"\r", "patch-crlf")):
        if byte in data:
            raise IntegrityError(reason, line=data[: data.index(byte)].count(b"\n") + 1)
    if not data.endswith(b"\n"):
        raise IntegrityError("patch-no-final-newline", line=data.count(b"\n") + 1)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise IntegrityError("patch-not-utf8", line=line) from error


def special_header(line: str) -> str | None:
    """Returns the reason to refuse an extended git header, or None if ``line`` is not one."""
    for start, reason in _SPECIAL_HEADERS:
        if line.startswith(start):
            return reason
    return None
