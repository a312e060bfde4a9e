# SPDX-License-Identifier: Apache-2.0
"""Writes the file that ``-o`` names, whole or not at all."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..explain.text import printable
from ..record.files import write_whole
from ..record.store import plain
from .errors import ReportError

HTML = (".html", ".htm", "")
_TYPED = (".html", ".htm", ".svg", ".png", ".pdf", ".json", ".csv", ".md")
"""Endings that say what a file holds; any other may hold any format."""
_STANDARD = ("-", "/dev/stdout")
"""Names of standard output, which what else is printed may share."""


def check(path: Path, form: str | None = None, inputs: Iterable[Path] = (), pages: Sequence[str] = HTML) -> None:
    """Raise ReportError where ``path`` cannot be written; called before the work is done.

    ``form`` is the format asked for, such as ``json``; without one the file is a page, whose endings are ``pages``.
    None of the ``inputs`` is overwritten.
    """
    if path.is_file() and any(each.exists() and each.samefile(path) for each in inputs):
        raise ReportError(f"{path} is what is to be read: -o names another file to write.")
    kind = path.suffix.lower()
    if form is not None and kind in _TYPED and kind != f".{form}":
        fit = path.with_suffix(f".{form}")
        raise ReportError(f"{path} would hold {form}, not {kind}: name {fit}, or ask for no format but a page.")
    if form is None and kind not in pages and not path.is_dir():
        how = "print it from a browser" if kind == ".pdf" else "see --help for other formats"
        raise ReportError(f"{path} would hold HTML, not {kind}: name {path.with_suffix('.html')}, and {how}.")
    _check_place(path)


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise ReportError(f"{path} is a folder: -o names the file to write, such as {path / 'report.html'}.")
    if path.is_symlink() and path.is_file() and not path.absolute().is_relative_to("/dev"):
        raise ReportError(f"{path} is a link, and nothing is written through one: name {path.resolve()} itself.")
    folder = path.parent
    if not folder.is_dir():
        raise ReportError(f"{path} cannot be written: there is no folder {folder}. Make it with: mkdir -p {folder}")


def as_json(document: Any) -> str:
    """Write a document as every ``--json`` does; numbers that are not finite are strings."""
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def deliver(path: Path | None, text: str) -> None:
    """Writes the text to a file and prints its path; prints the text where there is no path."""
    if path is None or is_standard(path):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        try:
            sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
        except BrokenPipeError:
            silence()
    else:
        write(path, text)
        say(path)


def is_standard(path: Path) -> bool:
    """Return whether ``path`` names standard output."""
    return str(path) in _STANDARD


def silence() -> None:
    """Print nothing more, as the reader, such as `head`, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: object, file: TextIO | None = None) -> None:
    """Print a line without characters that control a terminal."""
    print(printable(str(text)), file=file or sys.stdout)


def write(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, or to a device or pipe; what UTF-8 cannot spell is replaced."""
    _check_place(path)
    if path.exists() and not path.is_file() or path.absolute().is_relative_to("/dev"):
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", errors="replace"))
    else:
        write_whole(path, content)
