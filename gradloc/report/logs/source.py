# SPDX-License-Identifier: Apache-2.0
"""A file as bytes or lines, whatever it was packed with and whatever its letters are coded in; archives of several
files, unpacked into a folder that goes when the report is made."""

import bz2
import gzip
import importlib
import io
import lzma
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from ..errors import ReportError

HEAD = 1 << 16
"""Bytes that say what a file is."""
LONGEST = 1 << 22
"""Characters of a line that are read as one; a longer line is no log's."""
LARGEST = 4_000_000_000
"""Bytes that an archive may hold unpacked."""
_PACKED = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zst"}
_ARCHIVES = {b"PK\x03\x04": "unzip", b"ustar": "tar xf", b"7z\xbc\xaf": "7z x"}
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


class Source:
    """One file.

    Args:
        path: an existing file.
        name: what sentences call it, where that is not the file's name.

    Raises:
        ReportError: when it cannot be opened, is an archive of several files, or needs a package that is not there.
    """

    def __init__(self, path: Path, name: str | None = None):
        self.path = path
        self.name = name or path.name
        self.notes: list[str] = []
        self._stream = io.BufferedReader(path.open("rb", buffering=0), HEAD)
        packed = next((kind for magic, kind in _PACKED.items() if self._stream.peek(6).startswith(magic)), None)
        self._is_packed = packed is not None
        if packed is not None:
            inner = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open, "zst": _open_zst}[packed](self._stream)
            self._stream = io.BufferedReader(_Unpacked(inner, self._note_cut), HEAD)
        self.head = self._stream.peek(HEAD)[:HEAD]
        for magic, command in _ARCHIVES.items():
            if (self.head.startswith(magic) or self.head[257:262] == magic) and not is_spreadsheet(path):
                raise ReportError(f"{self.name} is an archive of several files: unpack it first: {command} {path}")
        self.coding = _coding(self.head)
        """None for bytes that are no text."""

    @property
    def text_head(self) -> str:
        return "" if self.coding is None else self.head.decode(self.coding, errors="replace").lstrip("\ufeff")

    def read(self) -> bytes:
        return self._stream.read()

    def lines(self) -> Iterator[str]:
        """Its lines without their ends, which may be \\n, \\r\\n or \\r: a progress bar's end in \\r alone."""
        reader = io.TextIOWrapper(self._stream, self.coding or "utf-8", errors="replace")
        try:
            while line := reader.readline(LONGEST):
                yield line.rstrip("\n")
        except UnicodeError as error:  # UTF-16 that is none after all
            self._note_cut(error)
        reader.detach()

    @property
    def ends_whole(self) -> bool:
        """Whether the last line has its end, as far as the file itself says."""
        if self._is_packed:
            return not self.notes
        with self.path.open("rb") as file:
            file.seek(max(file.seek(0, io.SEEK_END) - 2, 0))
            end = file.read()
        return b"\n" in end or b"\r" in end

    def note_one_metric(self) -> None:
        self.notes.append(f"{self.name} does not name its one metric: it was taken for the gradient norm.")

    def _note_cut(self, error: Exception) -> None:
        self.notes.append(f"{self.name} is cut off or damaged ({error}): what comes after that was not read.")


class _Unpacked(io.RawIOBase):
    """What can be unpacked of a file; where it is cut off or damaged it ends."""

    def __init__(self, file: BinaryIO, note: Callable[[Exception], None]):
        self._note = note
        self._take = getattr(file, "read1", file.read)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            part = self._take(len(buffer))
        except Exception as error:  # each format's library has kinds of its own
            self._note(error)
            self._take, part = (lambda size: b""), b""
        buffer[: len(part)] = part
        return len(part)


def _coding(head: bytes) -> str | None:
    """How the letters are coded; None for bytes that are no text."""
    for mark, coding in _MARKS.items():
        if head.startswith(mark):
            return coding
    zeros = (head[:2000:2].count(0), head[1:2000:2].count(0))
    if sum(zeros) > len(head[:2000]) // 4:
        if min(zeros) * 8 < max(zeros):  # every other byte
            return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
        return None
    if b"\x00" in head[:4096]:
        return None
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # else the head ends within a letter
            return "latin-1" if sum(byte < 9 for byte in head) * 100 <= len(head) else None
    return "utf-8"


def _open_zst(stream: BinaryIO) -> BinaryIO:
    for name, make in (  # pyarrow's never ends on a damaged file
        ("compression.zstd", lambda module: module.open(stream)),
        ("zstandard", lambda module: module.ZstdDecompressor().stream_reader(stream)),
    ):
        try:
            return make(importlib.import_module(name))
        except ImportError:
            continue
    raise ReportError("a .zst file needs a package to be read: pip install zstandard, or unpack it first: zstd -d FILE")


def unpack(path: Path, until: ExitStack) -> Path:
    """The folder with an archive's files, which lasts as long as ``until``; the path itself where it is none.

    Raises:
        ReportError: when it is too large, damaged, or locked.
    """
    if not path.is_file():
        return path
    try:
        if zipfile.is_zipfile(path) and not is_spreadsheet(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist()):
                    raise ReportError(f"{path.name} holds weights that torch saved, and no log.")
                folder = _room_for(path, [entry.file_size for entry in archive.infolist()], until)
                archive.extractall(folder)
                return folder
        if _is_tar(path):
            with tarfile.open(path) as archive:
                members = [member for member in archive if member.isfile()]
                folder = _room_for(path, [member.size for member in members], until)
                archive.extractall(folder, members, filter="data")
                return folder
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


def _room_for(path: Path, sizes: list[int], until: ExitStack) -> Path:
    """A new folder for files of these sizes; raises ReportError where they are too large."""
    if sum(sizes) > LARGEST:
        raise ReportError(f"{path.name} holds {sum(sizes) / 1e9:.1f} GB: unpack it and name the log in it.")
    return Path(until.enter_context(tempfile.TemporaryDirectory()))
