# SPDX-License-Identifier: Apache-2.0
"""Writes what ``-o`` asks for: the whole file or nothing."""

import sys
from pathlib import Path

from .errors import ReportError

HTML = (".html", ".htm", "")


def check(path: Path, suffixes: tuple[str, ...] | None = HTML) -> None:
    """Raises ReportError where ``path`` cannot be written; called before the work is done.

    ``suffixes``: of the files that the command can write; None: any.
    """
    kind = path.suffix.lower()
    if suffixes is not None and kind not in suffixes and not path.is_dir():
        how = "print it from a browser" if kind == ".pdf" else "see --format for other formats"
        raise ReportError(f"{path} would hold HTML, not {kind}: name {path.with_suffix('.html')}, and {how}.")
    if path.is_dir():
        raise ReportError(f"{path} is a folder: -o names the file to write, such as {path / 'report.html'}.")
    folder = path.parent
    if not folder.is_dir():
        raise ReportError(f"{path} cannot be written: there is no folder {folder}. Make it with: mkdir -p {folder}")


def deliver(path: Path | None, text: str) -> None:
    """Writes the text to a file and prints its path; prints the text where there is no path."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        sys.stdout.write(text)
    else:
        write(path, text)
        print(path)


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all, or to a device or pipe; what UTF-8 cannot spell is replaced."""
    check(path, None)
    path = path.resolve()  # the file that a link names
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    partial.replace(path)
