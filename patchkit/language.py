# SPDX-License-Identifier: Apache-2.0
"""Reads a patch, strictly: exactly the language that ``make_patch.sh`` writes; applies it at its exact lines.

An optional preamble, then per file, in sorted order: ``diff --git``, ``new file mode 100644`` for a new file, ``index``
with two full blob ids, ``---``, ``+++`` and hunks with exact counts. All else is refused by line number. So each file's
content before and after is known, and a name can mean one file only.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .refusal import INTEGRITY, RESTORE, Refusal

MAX_BYTES = 2**20
MAX_PREAMBLE_LINES = 64
CONTEXT_LINES = 3
ABSENT = "0" * 40
"""How an ``index`` line writes "no file"."""
NOT_OURS = "The patch was not written by make_patch.sh, or was changed afterwards."
_DIFF = re.compile(r"diff --git a/(.*) b/(.*)\Z")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( 100644)?\Z")
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\Z")
_PATH = re.compile(r"verl/[A-Za-z0-9_./-]{1,195}\Z")
_GIT = re.compile(r"(git~\d+|\.git.*|con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?\Z", re.IGNORECASE)
_LOOKS = (
    (rb"\x1f\x8b|PK\x03\x04|BZh|\xfd7zXZ", "patch-compressed", "is compressed"),
    (rb"\xff\xfe|\xfe\xff|.\0", "patch-utf16", "is UTF-16"),
    (rb"\xef\xbb\xbf", "patch-bom", "begins with a byte order mark"),
    (rb"\s*<(!doctype|html|\?xml)", "patch-html", "is a web page"),
    (rb"\Z", "patch-empty", "is empty"),
    (rb"[^\0]*\0", "patch-nul", "holds a NUL"),
    (rb"[^\r]*\r", "patch-crlf", "has CRLF line ends ('*.patch -text' in .gitattributes keeps git from it)"),
    (rb"(?s:.*)[^\n]\Z", "patch-no-final-newline", "ends without a line end"),
)


def sha256_hex(data: bytes) -> str:
    """The sha256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """git's id for ``data`` as a file's content, as ``git hash-object`` prints it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def short(blob: str | None) -> str:
    """A blob id, or its absence, for a message."""
    return f"git blob {blob[:12]}" if blob else "no file"


def hidden_character(text: str) -> str | None:
    """The first control or format character of ``text`` as ``U+XXXX`` (CVE-2021-42574), else None."""
    found = (char for char in text if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"))
    return next((f"U+{ord(char):04X}" for char in found), None)


def check_path(path: str) -> None:
    """Refuses a path that leaves ``verl/``, or that means another file on another disk."""
    parts = path.split("/")
    is_odd = any(part in ("", ".", "..") or part[-1] in ". " or _GIT.match(part) for part in parts)
    if is_odd or not _PATH.match(path):
        what = f"the path {path!r} may not stand in a patch"
        raise refused("path-unsafe", what, "The patch was made for another tree, or by someone who means harm.")


def refused(reason: str, what: str, cause: str = NOT_OURS, **data: Any) -> Refusal:
    """The refusal of a patch."""
    return Refusal(INTEGRITY, reason, what, cause, RESTORE, **data)


@dataclass(frozen=True)
class Hunk:
    """Lines ``old`` that stand at line ``old_start`` (from 1) become ``new`` at ``new_start``.

    ``lead`` and ``trail`` count the context lines before and after the changes; ``line`` is the header's in the patch.
    """

    old_start: int
    old: tuple[str, ...]
    new_start: int
    new: tuple[str, ...]
    lead: int
    trail: int
    line: int

    @property
    def starts(self) -> tuple[int, int]:
        """The first line of each side, from 1; an empty side is written with the line BEFORE it."""
        return self.old_start + (not self.old), self.new_start + (not self.new)


@dataclass(frozen=True)
class FilePatch:
    """One file's section: its path, blob ids before (None for a new file) and after, and what changes."""

    path: str
    before: str | None
    after: str
    hunks: tuple[Hunk, ...]

    def forward(self, base: bytes) -> bytes:
        """The result on ``base``, empty for a new file; checked by its id."""
        return self._checked(self.after, apply_hunks(self.path, self.hunks, base))

    def backward(self, result: bytes) -> bytes:
        """The base that ``result`` was made from, checked by its id; ``before`` must not be None."""
        inverse = tuple(Hunk(h.new_start, h.new, h.old_start, h.old, h.lead, h.trail, h.line) for h in self.hunks)
        return self._checked(self.before, apply_hunks(self.path, inverse, result))

    def _checked(self, expected: str | None, data: bytes) -> bytes:
        if blob_id(data) != expected:
            what = f"{self.path} would not become what the patch promises"
            raise refused("result-digest", what, expected=short(expected), found=short(blob_id(data)))
        return data


def parse(data: bytes) -> dict[str, FilePatch]:
    """The sections of the patch ``data`` by path; a refusal says which line is outside the language."""
    for pattern, reason, looks in _LOOKS:
        found = re.match(pattern, data, re.IGNORECASE)
        if found:
            line = found.end() and data[: found.end() - 1].count(b"\n") + 1
            raise refused(reason, f"the patch {looks} (line {line})", "It was damaged, or is another file.")
    try:
        reader = _Reader(data.decode("utf-8").split("\n")[:-1])
    except UnicodeDecodeError as error:
        raise refused("patch-not-utf8", f"line {data[: error.start].count(10) + 1} is not UTF-8") from error
    reader.skip_preamble()
    files: dict[str, FilePatch] = {}
    while reader.peek() is not None:
        file = _read_file(reader)
        if files and file.path <= max(files):
            raise reader.refusal("patch-unsorted", f"{file.path} comes twice, or after {max(files)}")
        files[file.path] = file
    _check_collisions(files)
    return files


def _check_collisions(paths: Iterable[str]) -> None:
    """Refuses two paths that are one file where case does not count, or of which one lies in the other."""
    folded = [path.casefold() for path in paths]
    folders = {"/".join(path.split("/")[:depth]) for path in folded for depth in range(1, path.count("/") + 1)}
    clash = [path for path in folded if folded.count(path) > 1 or path in folders]
    if clash:
        raise refused("path-collision", f"{clash[0]} is another path of the patch in other case, or its folder")


class _Reader:
    """The patch's lines, with a cursor."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.number = lines, 0

    def refusal(self, reason: str, what: str, cause: str = NOT_OURS, **data: Any) -> Refusal:
        return refused(reason, f"line {data.pop('line', self.number)}: {what}", cause, **data)

    def unknown(self, found: str) -> Refusal:
        return self.refusal("patch-unknown-line", "this is no part of the patch language", found=found[:80])

    def peek(self) -> str | None:
        return self.lines[self.number] if self.number < len(self.lines) else None

    def take(self) -> str:
        line = self.peek()
        if line is None:
            raise self.refusal("patch-truncated", "the patch ends in the middle", "The file was cut off.")
        self.number += 1
        return line

    def skip_preamble(self) -> None:
        for self.number, line in enumerate(self.lines):
            if line.startswith("diff --git "):
                return
            if line.startswith(("--- ", "+++ ", "@@ ", "diff ")) or self.number >= MAX_PREAMBLE_LINES:
                raise self.unknown(line)
        raise self.refusal("patch-no-files", "'diff --git' never occurs in the patch")


def _read_file(reader: _Reader) -> FilePatch:
    header = reader.take()
    match = _DIFF.match(header)
    if not match:
        raise reader.unknown(header)
    path = match[1]
    check_path(path)
    line = reader.peek() or ""
    is_new = line == "new file mode 100644"
    if is_new:
        reader.take()
    elif not line.startswith("index "):  # other modes, links, submodules, deletions, renames, binary data
        raise reader.refusal("patch-special", f"what is done to {path} is no edit of text", found=line[:80])
    before, after = _read_index(reader, path, is_new)
    wanted = ("--- " + ("/dev/null" if is_new else f"a/{path}"), f"+++ b/{path}")
    for expected, found in ((path, match[2]), *((line, reader.take()) for line in wanted)):
        if found != expected:
            what = "the patch names another file than its section"
            raise reader.refusal("patch-names-disagree", what, expected=expected, found=found[:80])
    return FilePatch(path, before, after, _read_hunks(reader, path, is_new))


def _read_index(reader: _Reader, path: str, is_new: bool) -> tuple[str | None, str]:
    text = reader.take()
    match = _INDEX.match(text)
    if not match:
        cause = "It was made by git diff without --full-index, so its base cannot be verified; or it sets a mode."
        raise reader.refusal("patch-index", f"the ids of {path} are not two full ones", cause, found=text[:90])
    before, after = match[1], match[2]
    if (before == ABSENT) != is_new or after == ABSENT or bool(match[3]) == is_new:
        raise reader.refusal("patch-index", f"the ids of {path} do not agree with what its section does", found=text)
    return (None if is_new else before), after


def _read_hunks(reader: _Reader, path: str, is_new: bool) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    while (reader.peek() or "").startswith("@@"):
        hunk = _read_hunk(reader, path)
        if not is_new:
            _check_place(reader, hunk, hunks[-1] if hunks else None, path)
        elif hunks or hunk.old or hunk.old_start or hunk.new_start != 1:
            raise reader.refusal("patch-new-file", f"the new file {path} is not one whole hunk", line=hunk.line)
        hunks.append(hunk)
    if not hunks:
        raise reader.refusal("patch-no-hunks", f"the section for {path} changes nothing")
    following = reader.peek()
    if following is not None and not following.startswith("diff --git "):
        reader.number += 1
        raise _miscounted(reader, path) if following[:1] in (" ", "+", "-") else reader.unknown(following)
    return tuple(hunks)


def _miscounted(reader: _Reader, path: str) -> Refusal:
    what = f"a hunk of {path} is longer or shorter than its header says"
    return reader.refusal("patch-count", what, "The patch was edited by hand.")


def _check_place(reader: _Reader, hunk: Hunk, previous: Hunk | None, path: str) -> None:
    """Hunks ascend, do not overlap, agree on the shift so far, and carry git's context, but for the file's ends."""
    end, shift = 1, 0
    if previous is not None:
        if previous.trail < CONTEXT_LINES:
            raise _little_context(path, previous.line)
        old_at, new_at = previous.starts
        end = old_at + len(previous.old)
        shift = new_at - old_at + len(previous.new) - len(previous.old)
    old_at, new_at = hunk.starts
    if old_at < end or new_at != old_at + shift:
        what = f"the hunks of {path} overlap, descend or disagree on line numbers"
        raise reader.refusal("patch-hunk-order", what, line=hunk.line)
    if hunk.lead < CONTEXT_LINES and old_at != 1:
        raise _little_context(path, hunk.line)


def _little_context(path: str, line: int) -> Refusal:
    what = f"line {line}: a hunk of {path} has less than three lines of context"
    return refused("patch-context", what, "It was made with -U0 or the like.")


def _read_hunk(reader: _Reader, path: str) -> Hunk:
    header = reader.take()
    line = reader.number
    match = _HUNK.match(header)
    if not match or "1" in (match[2], match[4]):  # git never writes a count of 1; one spelling only
        raise reader.unknown(header)
    old_count, new_count = (int(count) if count else 1 for count in (match[2], match[4]))
    old, new, marks = list[str](), list[str](), list[str]()
    while len(old) < old_count or len(new) < new_count:
        text = reader.take()
        mark = text[:1]
        if mark not in (" ", "+", "-") or not text:
            raise _miscounted(reader, path)
        if mark == "+" and (found := hidden_character(text[1:])):
            what = f"the patch adds an invisible or reordering character to {path}"
            cause = "Such characters make code read other than it runs."
            raise reader.refusal("patch-hidden-character", what, cause, found=found)
        marks.append(mark)
        if mark != "+":
            old.append(text[1:] + "\n")
        if mark != "-":
            new.append(text[1:] + "\n")
    if len(old) != old_count or len(new) != new_count:
        raise _miscounted(reader, path)
    changes = [index for index, mark in enumerate(marks) if mark != " "]
    if not changes:
        raise reader.refusal("patch-no-hunks", f"a hunk of {path} changes nothing", line=line)
    trail = len(marks) - 1 - changes[-1]
    return Hunk(int(match[1]), tuple(old), int(match[3]), tuple(new), changes[0], trail, line)


def split(text: str) -> list[str]:
    """The lines with their ends. Not splitlines(): a form feed or a lone CR ends no line of a patch."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_hunks(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    """``data`` with ``hunks`` applied where they say; a hunk that does not fit is refused with both sides shown."""
    lines, done, at = split(data.decode("utf-8", "surrogateescape")), list[str](), 0
    for number, hunk in enumerate(hunks, start=1):
        start = hunk.starts[0] - 1
        end = start + len(hunk.old)
        if lines[start:end] != list(hunk.old):
            raise misfit(path, number, hunk, lines[start:end])
        if hunk.trail < CONTEXT_LINES and end != len(lines):
            raise _little_context(path, hunk.line)
        done += [*lines[at:start], *hunk.new]
        at = end
    return "".join(done + lines[at:]).encode("utf-8", "surrogateescape")


def misfit(path: str, number: int, hunk: Hunk, there: list[str]) -> Refusal:
    """The refusal of a hunk whose lines are not there, with both sides from the first line that differs."""
    first = next((i for i, (a, b) in enumerate(zip(there, hunk.old, strict=False)) if a != b), min(len(there), len(hunk.old)))
    sides = (("expects", hunk.old[first:]), ("has", there[first:]))
    lines = [f"{side:<7} | {line.rstrip()}" for side, part in sides for line in [*part[:6]] or ["(the file's end)"]]
    at = hunk.starts[0] + first
    what, cause = f"hunk {number} of {path} does not fit at line {at}", "The file is not the one that it was made for."
    next_ = f"Edit {path} there by hand, then take it: bash make_patch.sh --repo CHECKOUT"
    return Refusal(INTEGRITY, "hunk-mismatch", what, cause, next_, hunk=number, line=at, lines=lines)
