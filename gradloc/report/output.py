# SPDX-License-Identifier: Apache-2.0
"""Writes what a command was asked to write with ``-o``: whole or not at all."""

import sys
from pathlib import Path

from .errors import ReportError


def check(path: Path) -> None:
    """Refuse an output that cannot be written, before the work is done.

    Raises:
        ReportError: says what is there, and the command that helps.
    """
    if path.is_dir():
        raise ReportError(f"{path} is a folder: -o names the file to write, such as {path / 'report.html'}.")
    folder = path.parent
    if not folder.is_dir():
        raise ReportError(f"{path} cannot be written: there is no folder {folder}. Make it with: mkdir -p {folder}")


def deliver(path: Path | None, text: str) -> None:
    """Write what a command was asked for and print where; without a path print the text itself."""
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
        sys.stdout.write(text)
    else:
        write(path, text)
        print(path)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; what UTF-8 cannot spell is replaced."""
    check(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    partial.replace(path)
