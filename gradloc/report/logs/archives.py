# SPDX-License-Identifier: Apache-2.0
"""Archives of several files, unpacked beside nothing: into a folder that goes when the report is made."""

import tarfile
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

from ..errors import ReportError

LARGEST = 4_000_000_000
"""Bytes that an archive may hold unpacked."""


def unpack(path: Path, until: ExitStack) -> Path:
    """The folder with an archive's files, which lasts as long as ``until``; the path itself where it is none.

    Raises:
        ReportError: when it is too large, damaged, or locked.
    """
    if not path.is_file():
        return path
    try:
        if is_spreadsheet(path):
            return path
        if zipfile.is_zipfile(path):
            return _unzip(path, until)
        if _is_tar(path):
            return _untar(path, until)
    except (zipfile.BadZipFile, tarfile.TarError, RuntimeError, EOFError, ValueError, NotImplementedError) as error:
        raise ReportError(f"{path.name} cannot be unpacked ({error}): unpack it and name the log in it.") from None
    return path


def is_spreadsheet(path: Path) -> bool:
    """Whether a file is an .xlsx: a zip with a table of contents of its own."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "xl/workbook.xml" in archive.namelist()


def _is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except Exception:  # a packed log that is cut off: each format's library has kinds of its own
        return False


def _unzip(path: Path, until: ExitStack) -> Path:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "data.pkl" in {name.rpartition("/")[2] for name in names}:
            raise ReportError(f"{path.name} holds weights that torch saved, and no log.")
        _check(path, sum(entry.file_size for entry in archive.infolist()))
        folder = Path(until.enter_context(tempfile.TemporaryDirectory()))
        archive.extractall(folder)
    return folder


def _untar(path: Path, until: ExitStack) -> Path:
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        _check(path, sum(member.size for member in members))
        folder = Path(until.enter_context(tempfile.TemporaryDirectory()))
        archive.extractall(folder, members, filter="data")
    return folder


def _check(path: Path, size: int) -> None:
    if size > LARGEST:
        raise ReportError(f"{path.name} holds {size / 1e9:.1f} GB: unpack it and name the log in it.")
