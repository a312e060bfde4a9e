# SPDX-License-Identifier: Apache-2.0
"""Reads a patch that ``make_patch.sh`` has written, and applies it at its exact lines on its exact files.

A preamble, then per file ``diff --git``, ``new file mode 100644`` for a new file, ``index`` with two full blob ids,
``---``, ``+++`` and hunks. So each file's content before and after is known. All else is refused.
"""

import hashlib
import re
import unicodedata
from dataclasses import dataclass

from .refusal import INTEGRITY, RESTORE, Refusal

MAX_BYTES = 2**20
CONTEXT_LINES = 3
ABSENT = "0" * 40
"""How an ``index`` line writes "no file"."""
_HEAD = re.compile(
    r"diff --git a/(?P<path>\S+) b/(?P=path)\n(?P<new>new file mode 100644\n)?"
    r"index (?P<before>[0-9a-f]{40})\.\.(?P<after>[0-9a-f]{40})(?: 100644)?\n"
    r"--- (?:a/(?P=path)|/dev/null)\n\+\+\+ b/(?P=path)\n(?=@@ )"
)
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\n")
_PATH = re.compile(r"verl/[A-Za-z0-9_./-]{1,195}\Z")
_ODD = re.compile(r"(|\.|\.\.|git~\d+|\.git.*|.*\.|(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?)\Z", re.IGNORECASE)


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
    if not _PATH.match(path) or any(map(_ODD.match, path.split("/"))):
        raise _refused("path-unsafe", f"the path {path!r} may not stand in a patch")


def _refused(reason: str, what: str, **ids: str) -> Refusal:
    cause = "The patch was not written by make_patch.sh, or was changed afterwards."
    return Refusal(INTEGRITY, reason, what, cause, RESTORE, **ids)


@dataclass(frozen=True)
class Hunk:
    """Lines ``old`` that stand at line ``start`` (from 0) become ``new`` at ``new_start``."""

    start: int
    old: list[str]
    new_start: int
    new: list[str]


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
        inverse = tuple(Hunk(hunk.new_start, hunk.new, hunk.start, hunk.old) for hunk in self.hunks)
        return self._checked(self.before, apply_hunks(self.path, inverse, result))

    def _checked(self, expected: str | None, data: bytes) -> bytes:
        if blob_id(data) != expected:
            ids = {"expected": short(expected), "found": short(blob_id(data))}
            raise _refused("result-digest", f"{self.path} would not become what the patch promises", **ids)
        return data


def parse(data: bytes) -> dict[str, FilePatch]:
    """The sections of the patch ``data`` by path."""
    files: dict[str, FilePatch] = {}
    for section in re.split(r"(?m)^(?=diff --git )", data.decode("utf-8", "replace"))[1:]:
        head = _HEAD.match(section)
        if not head or (head["before"] == ABSENT) != bool(head["new"]) or head["after"] == ABSENT:
            raise _refused("patch-section", f"{section.splitlines()[0][:90]!r} does not begin a section of our patches")
        path = head["path"]
        check_path(path)
        if any(path.casefold() == other.casefold() for other in files):
            raise _refused("patch-section", f"{path} comes twice")
        hunks = tuple(_hunk(path, text) for text in re.split(r"(?m)^(?=@@ )", section[head.end() :])[1:])
        files[path] = FilePatch(path, None if head["new"] else head["before"], head["after"], hunks)
    if not files:
        raise _refused("patch-section", "the patch holds no file")
    return files


def _hunk(path: str, text: str) -> Hunk:
    head, lines = _HUNK.match(text), split(text)[1:]
    old, new = ([line[1:] for line in lines if line[0] in marks] for marks in (" -", " +"))
    counts = [1 if count is None else int(count) for count in (head[2], head[4])] if head else []
    if not head or counts != [len(old), len(new)] or any(line[0] not in " +-" or line[-1] != "\n" for line in lines):
        raise _refused("patch-hunk", f"a hunk of {path} is not as long as it says, or holds what is no line of a file")
    # An empty side is written with the line BEFORE it.
    return Hunk(int(head[1]) - bool(old), old, int(head[3]) - bool(new), new)


def split(text: str) -> list[str]:
    """The lines with their ends. Not splitlines(): a form feed or a lone CR ends no line of a patch."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def apply_hunks(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    """``data`` with ``hunks`` applied where they say; a hunk that does not fit is refused with both sides shown."""
    lines, done, at = split(data.decode("utf-8", "surrogateescape")), list[str](), 0
    for number, hunk in enumerate(hunks, start=1):
        end = hunk.start + len(hunk.old)
        if hunk.start < at or lines[hunk.start : end] != hunk.old:
            raise misfit(path, number, hunk, lines[hunk.start : end])
        done += [*lines[at : hunk.start], *hunk.new]
        at = end
    return "".join(done + lines[at:]).encode("utf-8", "surrogateescape")


def misfit(path: str, number: int, hunk: Hunk, there: list[str]) -> Refusal:
    """The refusal of a hunk whose lines are not there, with both sides from the first line that differs."""
    pairs = enumerate(zip(there, hunk.old, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(there), len(hunk.old)))
    sides = (("expects", hunk.old[first:]), ("has", there[first:]))
    lines = [f"{side:<7} | {line.rstrip()}" for side, part in sides for line in part[:6] or ["(the file's end)"]]
    what = f"hunk {number} of {path} does not fit at line {hunk.start + first + 1}"
    cause = "The file is not the one that it was made for."
    next_ = f"Edit {path} there by hand, then take it: bash make_patch.sh --repo CHECKOUT"
    return Refusal(INTEGRITY, "hunk-mismatch", what, cause, next_, lines=lines)
