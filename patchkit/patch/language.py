# SPDX-License-Identifier: Apache-2.0
"""Reads a patch, strictly: exactly the language that ``build`` writes, nothing else.

An optional preamble, then per file, in sorted order: ``diff --git``, ``new file mode 100644`` for
a new file, ``index`` with two full blob ids, ``---``, ``+++`` and hunks with exact counts. Every
other thing that git or GNU patch would accept, ignore or guess at is refused by line number.
"""

import re
from dataclasses import dataclass

from ..errors import IntegrityError
from . import looks
from .digest import ABSENT_BLOB, Digest
from .paths import check_path, check_path_set
from .text import hidden_character

MAX_BYTES = 5 * 2**20
MAX_PREAMBLE_LINES = 64
CONTEXT_LINES = 3
_DIFF = re.compile(r"diff --git a/(.*) b/(.*)\Z")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( 100644)?\Z")
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\Z")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Lines ``old`` that stand at line ``old_start`` (from 1) become ``new`` at ``new_start``."""

    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]
    lead: int
    """Context lines before the first change."""
    trail: int
    """Context lines after the last change."""
    line: int
    """Where the hunk's header stands in the patch."""

    def inverse(self) -> "Hunk":
        """Returns the hunk that undoes this one."""
        return Hunk(self.new_start, self.new, self.old_start, self.old, self.lead, self.trail, self.line)


@dataclass(frozen=True)
class FilePatch:
    """One file's section: its path, digests (None for "no file") and hunks."""

    path: str
    before: Digest | None
    after: Digest
    hunks: tuple[Hunk, ...]


def parse(data: bytes) -> tuple[FilePatch, ...]:
    """Returns the sections of the patch ``data``.

    Raises:
        IntegrityError: for anything outside the language; ``line`` in its data says where.
    """
    looks.check_bytes(data)
    reader = _Reader(data.decode("utf-8").split("\n")[:-1])
    reader.skip_preamble()
    files = []
    while not reader.at_end:
        files.append(_read_file(reader))
    paths = [file.path for file in files]
    check_path_set(paths)
    for previous, path in zip(paths, paths[1:], strict=False):
        if path < previous:
            raise IntegrityError("patch-unsorted", path=path, other=previous)
    return tuple(files)


class _Reader:
    """The patch's lines, with a cursor."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.number = 0

    @property
    def at_end(self) -> bool:
        return self.number >= len(self.lines)

    def peek(self) -> str | None:
        return None if self.at_end else self.lines[self.number]

    def take(self) -> str:
        if self.at_end:
            raise IntegrityError("patch-truncated", line=len(self.lines))
        self.number += 1
        return self.lines[self.number - 1]

    def skip_preamble(self) -> None:
        for number, line in enumerate(self.lines):
            if line.startswith("diff --git "):
                self.number = number
                return
            if line.startswith(("--- ", "+++ ", "@@ ", "diff ")) or number >= MAX_PREAMBLE_LINES:
                raise IntegrityError("patch-dialect", line=number + 1, found=line[:60])
        raise IntegrityError("patch-no-files")


def _read_file(reader: _Reader) -> FilePatch:
    header = reader.take()
    line = reader.number
    match = _DIFF.match(header)
    if not match:
        raise IntegrityError("patch-unknown-line", line=line, found=header[:80])
    path = match[1]
    check_path(path, line)
    check_path(match[2], line)
    if match[2] != path:
        raise IntegrityError("patch-names-disagree", line=line, expected=path, found=match[2])
    is_new = _read_mode(reader, path)
    before, after = _read_index(reader, path, is_new)
    for mark, wanted in (("--- ", "/dev/null" if is_new else f"a/{path}"), ("+++ ", f"b/{path}")):
        found = reader.take()
        if found != mark + wanted:
            reason = "patch-names-disagree" if found.startswith(mark) else "patch-unknown-line"
            raise IntegrityError(reason, line=reader.number, expected=mark + wanted, found=found[:80])
    hunks = _read_hunks(reader, path, is_new)
    return FilePatch(path, before, after, hunks)


def _read_mode(reader: _Reader, path: str) -> bool:
    """True for a new file of mode 100644, False where no mode line stands; else raises."""
    line = reader.peek() or ""
    if line == "new file mode 100644":
        reader.take()
        return True
    reason = looks.special_header(line)
    if reason:
        raise IntegrityError(reason, path=path, line=reader.number + 1, found=line[:80])
    return False


def _read_index(reader: _Reader, path: str, is_new: bool) -> tuple[Digest | None, Digest]:
    text = reader.take()
    match = _INDEX.match(text)
    if not match:
        abbreviated = re.match(r"index [0-9a-f]{4,40}\.\.[0-9a-f]{4,40}( 100644)?\Z", text)
        reason = "patch-abbreviated" if abbreviated else "patch-unknown-line"
        if text.startswith("index ") and re.search(r" 1(00755|20000|60000|04755|00777)\Z", text):
            reason = "mode-refused"
        raise IntegrityError(reason, path=path, line=reader.number, found=text[:80])
    before, after = match[1], match[2]
    if (before == ABSENT_BLOB) != is_new or after == ABSENT_BLOB or bool(match[3]) == is_new:
        raise IntegrityError("patch-index", path=path, line=reader.number, found=text)
    return (None if is_new else Digest(before)), Digest(after)


def _read_hunks(reader: _Reader, path: str, is_new: bool) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    while (reader.peek() or "").startswith("@@"):
        hunk = _read_hunk(reader, path)
        if not is_new:
            _check_place(hunk, hunks[-1] if hunks else None, path)
        elif hunks or hunk.old or hunk.old_start or hunk.new_start != 1:
            raise IntegrityError("patch-new-file", path=path, line=hunk.line)
        hunks.append(hunk)
    if not hunks:
        raise IntegrityError("patch-no-hunks", path=path, line=reader.number)
    following = reader.peek()
    if following is not None and not following.startswith("diff --git "):
        reason = "patch-count" if following[:1] in (" ", "+", "-") else "patch-unknown-line"
        raise IntegrityError(reason, path=path, line=reader.number + 1, found=following[:80])
    return tuple(hunks)


def _check_place(hunk: Hunk, previous: Hunk | None, path: str) -> None:
    """Hunks ascend, do not overlap, agree on the shift so far, and carry git's context.

    Less context is right only at the file's ends; the end is checked when the hunk is applied.
    """
    end, shift = 1, 0
    if previous is not None:
        if previous.trail < CONTEXT_LINES:
            raise IntegrityError("patch-context", path=path, line=previous.line)
        old_at, new_at = _starts(previous)
        end = old_at + len(previous.old)
        shift = new_at - old_at + len(previous.new) - len(previous.old)
    old_at, new_at = _starts(hunk)
    if old_at < end or new_at != old_at + shift:
        raise IntegrityError("patch-hunk-order", path=path, line=hunk.line)
    if hunk.lead < CONTEXT_LINES and old_at != 1:
        raise IntegrityError("patch-context", path=path, line=hunk.line)


def _starts(hunk: Hunk) -> tuple[int, int]:
    """The first line of each side; an empty side is written with the line BEFORE it."""
    return hunk.old_start + (not hunk.old), hunk.new_start + (not hunk.new)


def _read_hunk(reader: _Reader, path: str) -> Hunk:
    header = reader.take()
    line = reader.number
    match = _HUNK.match(header)
    if not match:
        raise IntegrityError("patch-unknown-line", path=path, line=line, found=header[:80])
    old_count, new_count = (int(count) if count else 1 for count in (match[2], match[4]))
    if match[2] == "1" or match[4] == "1":  # never written so by git; one spelling only
        raise IntegrityError("patch-unknown-line", path=path, line=line, found=header[:80])
    old: list[str] = []
    new: list[str] = []
    marks = []
    while len(old) < old_count or len(new) < new_count:
        text = reader.peek()
        if text is None:
            raise IntegrityError("patch-truncated", path=path, line=len(reader.lines))
        mark = text[:1]
        if mark not in (" ", "+", "-") or (mark == " " and not text):
            raise IntegrityError("patch-count", path=path, line=reader.number + 1, found=text[:80])
        reader.take()
        if mark == "+":
            _check_added(text[1:], path, reader.number)
        marks.append(mark)
        ending = "" if reader.peek() == _NO_NEWLINE else "\n"
        if not ending:
            reader.take()
            if mark == "+":
                raise IntegrityError("patch-result-newline", path=path, line=reader.number)
        if mark != "+":
            old.append(text[1:] + ending)
        if mark != "-":
            new.append(text[1:] + ending)
    if len(old) != old_count or len(new) != new_count:
        raise IntegrityError("patch-count", path=path, line=reader.number)
    if set(marks) <= {" "}:
        raise IntegrityError("patch-no-hunks", path=path, line=line)
    lead = next(index for index, mark in enumerate(marks) if mark != " ")
    trail = next(index for index, mark in enumerate(reversed(marks)) if mark != " ")
    return Hunk(int(match[1]), tuple(old), int(match[3]), tuple(new), lead, trail, line)


def _check_added(text: str, path: str, line: int) -> None:
    found = hidden_character(text)
    if found:
        raise IntegrityError("patch-hidden-character", path=path, line=line, found=found)
