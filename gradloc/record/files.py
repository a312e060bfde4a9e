# SPDX-License-Identifier: Apache-2.0
"""Read untrusted files within limits, and write files whole or not at all.

A log or a bundle may come from a stranger. Every limit of a reader is here; docs/security.md has them in a table.
"""

import errno
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

MB = 1_000_000
DOCUMENT = 48 * MB  # bytes of a document that is held as a whole
NESTED = 64  # levels of lists and objects in a document
OPENED = 1 * MB  # lists and objects in a document
VALUES = 6 * MB  # values in a document
LITERAL = MB // 2  # values in a Python literal, which takes ten times the memory of JSON
RATIO, FREE = 40, 10 * MB  # bytes that one packed byte may become, beyond the first ones; a log packs 5 to 30 to one
UNPACKED = 4_000 * MB  # bytes that an archive, a packed file or a pipe may hold
WINDOW = 160 * MB  # bytes of memory that unpacking a .xz may take; xz -9 takes 65 MB
MEMBERS = 10_000  # files in an archive
HEADER = 64_000  # bytes of a long name or of attributes in a tar, of a name or a comment in a gzip
RECORD = 8 * MB  # bytes of a record in a stream of records
LINE = 1 << 22  # characters of a line that are read as one; a longer line is no log's
SHEET = 48 * MB  # bytes of a spreadsheet unpacked
TAGS = MB // 2  # tags and attributes between two rows of a spreadsheet
COLUMNS = 4096  # columns of a table
NAME = 500  # characters of a metric's or a setting's name, with what it is nested in
CELLS = 4 * MB  # steps times metrics, where there are fewer than a quarter as many values
SETTINGS = MB // 5  # bytes of a run's config, and values that its anchors may make of it
_NUMBER = r"(?:u?int\d+|halffloat|float|double|bool)"
_TEXT = r"(?:large_)?(?:string|binary)"
_OF_PARQUET = re.compile(
    rf"{_NUMBER}|{_TEXT}|null|(?:decimal|date|time|duration).*|dictionary<values=(?:{_NUMBER}|{_TEXT}),.*"
    rf"|(?:large_)?list<\w+: {_NUMBER}(?: not null)?>"
)
_NO_MARK = bytes({*range(256)} - {*b"[{,"})
QUERY_SECONDS = 8.0  # seconds between two rows of a database


def parse_json(text: str | bytes, has_levels: bool = True) -> Any:
    """Parse JSON from a file; raise ValueError where it is none, too large, or nested deeper than anything we read.

    ``has_levels`` is False for a caller that takes known fields alone, as :func:`.reading.read` does.
    """
    if len(text) > OPENED:  # one of fewer characters has fewer of each
        marks = (text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).translate(None, _NO_MARK)
        opened = marks.count(b"[") + marks.count(b"{")
        if len(text) > DOCUMENT or marks.count(b",") > VALUES or opened > OPENED:
            raise ValueError(f"it holds more than {DOCUMENT // MB} MB, {VALUES:,} values or {OPENED:,} lists")
    try:
        value = json.loads(text)
        is_deeper = has_levels and _is_deeper(value)
    except RecursionError:
        is_deeper = True
    if is_deeper:
        raise ValueError(f"it is nested more than {NESTED} levels deep")
    return value


def _is_deeper(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(NESTED + 2):
        inner = (each.values() if type(each) is dict else each for each in level)
        level = [item for items in inner for item in items if type(item) is dict or type(item) is list]
        if not level:
            return False
    return True


def is_larger(value: Any, most: int) -> bool:
    """Return whether lists and dicts hold more values than ``most``, each counted as often as it is there."""
    left, count = [value], 0
    while left and count <= most:
        part = left.pop()
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        count += 1 + len(inner)
        left += inner
    return count > most


def columns_of_parquet(data: Any, size: int) -> dict[str, str]:
    """Return the types of a parquet's columns by name, of those whose values are no larger than is announced: numbers,
    lists of numbers, and texts, which are to be read as a dictionary.

    Raises:
        ValueError: the metadata of ``size`` bytes announces more values than bytes.
    """
    groups = [data.row_group(at) for at in range(data.num_row_groups)]
    counts = [sum(group.column(at).num_values for group in groups) for at in range(min(data.num_columns, COLUMNS))]
    if max([data.num_rows, *counts]) > size or data.num_columns > COLUMNS:
        raise ValueError(f"{data.num_rows:,} rows and {data.num_columns:,} columns in {size:,} bytes")
    types = {field.name: str(field.type) for field in data.schema.to_arrow_schema()}
    return {name: kind for name, kind in types.items() if _OF_PARQUET.fullmatch(kind)}


def is_bomb(unpacked: int, packed: int) -> bool:
    """Return whether ``packed`` bytes unpack to more than any log does."""
    return unpacked > UNPACKED or unpacked > FREE and unpacked > RATIO * packed


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path, its links resolved, is in a folder."""
    with suppress(OSError, RuntimeError):
        return path.resolve().is_relative_to(root.resolve())
    return False


def read_bytes(path: Path, root: Path | None = None, most: int = DOCUMENT) -> bytes:
    """Read a regular file.

    Args:
        path: what else it is, such as a pipe, is not waited for.
        root: a folder that the file has to be in; None: it may be anywhere.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, is no regular file, or leads out of ``root``.
        ValueError: it is larger.
    """
    if root is not None and not is_inside(path, root):
        raise OSError(errno.ELOOP, "leads out of the run's folder, and is not followed", str(path))
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most / MB:g} MB")
    return content


def read_json(path: Path, root: Path | None = None) -> Any:
    """Read a JSON file; raise as :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_bytes(path, root).decode("utf-8", errors="replace"))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; what UTF-8 cannot spell is replaced.

    The file that was there keeps its mode, and a link is refused with an OSError. What is half written has a name of
    its own, and goes when writing fails.
    """
    content = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link, and nothing is written through one", str(path))
    partial = path.with_name(f".{path.name[:60]}.{secrets.token_hex(6)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(content)
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(partial, path)
    except OSError as error:  # a folder that may not be written to, a full disk: the caller knows the path alone
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            partial.unlink()
