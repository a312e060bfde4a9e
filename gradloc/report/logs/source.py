# SPDX-License-Identifier: Apache-2.0
"""A file as bytes or lines, whatever it was packed with and whatever its letters are coded in; archives of several
files, unpacked into a folder that goes when the report is made."""

import bz2
import gzip
import importlib
import io
import lzma
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from ...record.files import DOCUMENT, HEADER, LINE, MB, MEMBERS, NESTED, SHEET, UNPACKED, WINDOW, is_bomb
from ..errors import ReportError

HEAD = 1 << 16
"""Bytes that say what a file is."""
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
        self.last = ""
        """The last line, once all are read."""
        self.stream, self._is_packed = _opened(path, self.notes)
        _skip_hole(self.stream)
        self.head = self.stream.peek(HEAD)[:HEAD]
        for magic, command in _ARCHIVES.items():
            if (self.head.startswith(magic) or self.head[257:262] == magic) and not is_spreadsheet(path):
                raise ReportError(f"{self.name} is an archive of several files: unpack it first: {command} {path}")
        self.coding = _coding(self.head)
        """None for bytes that are no text."""

    @property
    def text_head(self) -> str:
        return "" if self.coding is None else self.head.decode(self.coding, errors="replace").lstrip("\ufeff")

    def read(self) -> bytes:
        """Return its bytes as a whole; raises ReportError where they are more than a document may have."""
        content = self.stream.read(DOCUMENT + 1)
        if len(content) > DOCUMENT:
            raise ReportError(
                f"{self.name} is one document of more than {DOCUMENT // MB} MB, which is not held as a whole: write a "
                "line for each step, such as with: jq -c '.log_history[]' FILE > run.jsonl"
            )
        return content

    def lines(self) -> Iterator[str]:
        """Yield its lines without their ends: \n, \r\n, or \r alone or backspaces, as a progress bar's."""
        reader = io.TextIOWrapper(self.stream, self.coding or "utf-8", errors="replace")
        try:
            while text := reader.read(HEAD):
                if text[-1] != "\n":
                    text += reader.readline(LINE)
                if "\b" in text:  # Keras goes back over its bar by backspaces
                    text = re.sub("\b+", "\n", text)
                lines = text.removesuffix("\n").split("\n")
                yield from lines
                self.last = lines[-1]
        except UnicodeError as error:  # UTF-16 that is none after all
            self.notes.append(_cut(self.name, error))
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
        self.notes.append(f"{self.name} has one metric without a name: it was read as the gradient norm.")


def _skip_hole(stream: io.BufferedReader) -> None:
    """Skip the zeros at the beginning of a log that was emptied while its writer had it open."""
    while (head := stream.peek(HEAD)).startswith(b"\0\0\0\0"):
        stream.read(len(head) - len(head.lstrip(b"\0")))


def _cut(name: str, why: object) -> str:
    return f"{name} is cut off or damaged ({why}): what comes after that was not read."


def _opened(path: Path, notes: list[str]) -> tuple[io.BufferedReader, bool]:
    """Return a file's bytes, unpacked where it is packed, and whether it is."""
    stream = _Stream(path.open("rb", buffering=0), HEAD)
    packed = next((kind for magic, kind in _PACKED.items() if stream.peek(6).startswith(magic)), None)
    if packed is None:
        return stream, False
    inner = {"gz": gzip.open, "xz": _Xz, "bz2": bz2.open, "zst": _open_zst}[packed](stream)
    return io.BufferedReader(_Unpacked(inner, path, notes), HEAD), True


class _Stream(io.BufferedReader):
    """A file's bytes; a gzip's name or comment without end, which is read byte by byte, raises a ValueError."""

    _num_single = 0

    def read(self, size: int | None = -1) -> bytes:
        self._num_single = self._num_single + 1 if size == 1 else 0
        if self._num_single > HEADER:
            raise ValueError(f"a name of over {HEADER:,} bytes")
        return super().read(size)


class _Unpacked(io.RawIOBase):
    """A compressed file's content, which ends where the file is cut off or damaged."""

    def __init__(self, file: BinaryIO, path: Path, notes: list[str]):
        self._name, self._notes, self._packed, self._size = path.name, notes, path.stat().st_size, 0
        self._take = getattr(file, "read1", file.read)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            part = self._take(len(buffer))
        except Exception as error:  # each format's library has kinds of its own
            self._notes.append(_cut(self._name, error))
            self._take, part = (lambda size: b""), b""
        self._size += len(part)
        if is_bomb(self._size, self._packed):
            sizes = f"{self._packed / MB:,.1f} MB, which become more than {self._size / MB:,.0f} MB"
            raise ReportError(f"{self._name} has {sizes}, as no log does: unpack it and name the log in it.")
        buffer[: len(part)] = part
        return len(part)


def _coding(head: bytes) -> str | None:
    """Return how the letters are coded; None for bytes that are no text."""
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


class _Xz:
    """An xz file's content, one part after the other; a window that takes more memory than ``WINDOW`` is refused."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._decoder = stream, lzma.LZMADecompressor(memlimit=WINDOW)

    def read(self, size: int) -> bytes:
        part = b""
        while not part:
            packed = self._stream.read(8192) if self._decoder.needs_input else b""
            if self._decoder.eof:
                packed = self._decoder.unused_data.lstrip(b"\0") or self._stream.read(8192).lstrip(b"\0")
                if not packed:
                    break
                self._decoder = lzma.LZMADecompressor(memlimit=WINDOW)
            elif self._decoder.needs_input and not packed:
                raise EOFError("its end is missing")
            part = self._decoder.decompress(packed, size)
        return part


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


def spool(stream: BinaryIO, name: str, until: ExitStack) -> Path:
    """Return a pipe as a file, which can be read more than once and lasts as long as ``until``."""
    copy = until.enter_context(tempfile.NamedTemporaryFile())
    size = 0
    while part := stream.read(MB):
        size += copy.write(part)
        if size > UNPACKED:
            raise ReportError(f"{name} holds more than {UNPACKED / 1e9:.0f} GB: name a file with one run's log.")
    copy.flush()
    return Path(copy.name)


def unpack(path: Path, until: ExitStack) -> Path:
    """Return the folder with an archive's files, which lasts as long as ``until``; the path itself where it is none.

    Raises:
        ReportError: when it is too large, damaged, or locked.
    """
    if not path.is_file():
        return path
    advice = "unpack it and name the log in it."
    try:
        if zipfile.is_zipfile(path) and not is_spreadsheet(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist()):
                    raise ReportError(f"{path.name} holds weights that torch saved, and no log.")
                sizes = [entry.file_size for entry in archive.infolist()]
                if any(entry.compress_type == zipfile.ZIP_LZMA for entry in archive.infolist()):
                    raise ReportError(f"{path.name} is packed by LZMA, whose memory has no limit here: {advice}")
                if len(sizes) > MEMBERS or is_bomb(sum(sizes), path.stat().st_size):
                    raise ReportError(f"{path.name} holds {len(sizes):,} files, {sum(sizes) / 1e9:.1f} GB: {advice}")
                folder = Path(until.enter_context(tempfile.TemporaryDirectory()))
                archive.extractall(folder, [name for name in archive.namelist() if name.count("/") < NESTED])
                return folder
        notes: list[str] = []
        if archive := _as_tar(path, notes):
            folder, size = Path(until.enter_context(tempfile.TemporaryDirectory())), 0
            with archive:
                for count, member in enumerate(archive):
                    size += member.size
                    if count >= MEMBERS or is_bomb(size, path.stat().st_size):
                        raise ReportError(f"{path.name} holds over {count:,} files, {size / 1e9:.1f} GB: {advice}")
                    if member.isfile() and member.name.count("/") < NESTED:
                        archive.extract(member, folder, filter="data")
            if notes:
                raise EOFError(notes[0])
            return folder
    except (ReportError, PermissionError):
        raise
    except Exception as error:  # a full disk, a name that is too long; each format's library has kinds of its own
        said = getattr(error, "strerror", None) or error
        raise ReportError(f"{path.name} cannot be unpacked ({said}): {advice}") from None
    return path


def is_spreadsheet(path: Path) -> bool:
    """Return whether a file is an .xlsx: a zip with a table of contents of its own; raises ReportError where it is too
    large.

    A zip's own list of files is read only where it is short.
    """
    if not zipfile.is_zipfile(path):
        return False
    with path.open("rb") as file:
        file.seek(max(file.seek(0, io.SEEK_END) - HEAD, 0))
        end = file.read()
    size = int.from_bytes(end[(at := end.rfind(b"PK\5\6") + 12) : at + 4], "little")
    if size > 200 * MEMBERS:
        raise ReportError(f"{path.name} holds more than {MEMBERS:,} files: unpack it and name the log in it.")
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
        return False
    if "xl/workbook.xml" in sizes and sum(sizes.values()) > SHEET:
        raise ReportError(f"{path.name} is a spreadsheet of {sum(sizes.values()) / MB:,.0f} MB: save it as a CSV.")
    return "xl/workbook.xml" in sizes


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "_Member":
        """Read a header; raise ValueError where it announces a longer name or more attributes than any file has."""
        made = super().frombuf(buf, encoding, errors)
        if made.size > HEADER and not made.isfile():
            raise ValueError(f"a header of {made.size:,} bytes")
        return made


def _as_tar(path: Path, notes: list[str]) -> tarfile.TarFile | None:
    """Return a tar, packed or not, at its first file; None where it is none, such as a packed log."""
    stream, _ = _opened(path, notes)
    if stream.peek(1).startswith(b"\0"):  # to tarfile, an archive of no files
        return None
    try:
        return tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member)
    except tarfile.TarError:
        return None
