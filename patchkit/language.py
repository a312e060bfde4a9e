# SPDX-License-Identifier: Apache-2.0
"""Reads a patch, ours or another's, as git writes it, and applies it at its exact lines; all else is refused."""

import hashlib
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .refusal import INTEGRITY, RESTORE, Refusal

MAX_BYTES = 2**20
VERSION_FILE = "verl/version/version"
"""Says which verl it is; a run locks it, so no patch may replace it."""
_HEAD = re.compile(
    r"diff --git a/(?P<path>\S+) b/(?P=path)\n(?P<new>new file mode 100644\n)?"
    r"(?:index (?P<before>[0-9a-f]{7,40})\.\.(?P<after>[0-9a-f]{7,40})(?: 100644)?\n)?"
    r"--- (?P<old>a/(?P=path)|/dev/null)\n\+\+\+ b/(?P=path)\n(?=@@ )"
)
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\n")
_PATH = re.compile(r"verl/[A-Za-z0-9_./-]{1,195}\Z")
_ODD = re.compile(r"(|\.|\.\.|git~\d+|\.git.*|.*\.|(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?)\Z", re.IGNORECASE)
Hunk = tuple[int, list[str], int, list[str]]
"""The line (from 0) and the lines before, and the same after."""


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """Return git's id for ``data`` as a file's content, as ``git hash-object`` prints it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def hidden_character(text: str) -> str | None:
    """Return the first control or format character of ``text`` as ``U+XXXX`` (CVE-2021-42574), else None."""
    found = (char for char in text if char not in "\t\n" and unicodedata.category(char) in ("Cc", "Cf"))
    return next((f"U+{ord(char):04X}" for char in found), None)


def is_safe(path: str) -> bool:
    """Return whether a path is below ``verl/``, and means the same file on every disk."""
    return bool(_PATH.match(path)) and not any(map(_ODD.match, path.split("/"))) and path != VERSION_FILE


def _refused(reason: str, what: str, **more: Any) -> Refusal:
    cause = "The patch was not made by make_patch.sh or plain `git diff`, or was changed, or is for another file."
    return Refusal(INTEGRITY, reason, what, cause, RESTORE, **more)


@dataclass(frozen=True)
class FilePatch:
    """Holds one file's section: path, blob ids (or how they begin) before (None: a new file) and after, hunks."""

    path: str
    before: str | None
    after: str
    hunks: tuple[Hunk, ...]

    def forward(self, base: bytes | None) -> bytes:
        """Return the result on ``base``, which is None for a new file, checked by its id."""
        if (base is None) != (self.before is None):
            raise _refused("result-digest", f"{self.path} is missing, or is there and should not be")
        return self._checked(self.after, apply_hunks(self.path, self.hunks, base or b""))

    def backward(self, result: bytes) -> bytes | None:
        """Return the base, None for a new file, that ``result`` was made from, checked by its id."""
        inverse = tuple((new_start, new, start, old) for start, old, new_start, new in self.hunks)
        base = apply_hunks(self.path, inverse, self._checked(self.after, result))
        return self._checked(blob_id(b"") if self.before is None else self.before, base) or None

    def sides(self, there: bytes | None) -> tuple[bytes | None, bytes] | None:
        """Return the file's contents before and after, where ``there`` is one of them and not both; else None."""
        found = list[tuple[bytes | None, bytes]]()
        with suppress(Refusal):
            found.append((there, self.forward(there)))
        with suppress(Refusal):
            found += [] if there is None else [(self.backward(there), there)]
        return found[0] if len(found) == 1 else None

    def _checked(self, expected: str, data: bytes) -> bytes:
        if not (found := blob_id(data)).startswith(expected):
            ids = {"expected": f"git blob {expected[:12]}", "found": f"git blob {found[:12]}"}
            raise _refused("result-digest", f"{self.path} would not become what the patch promises", **ids)
        return data


def parse(data: bytes) -> dict[str, FilePatch]:
    """Return the sections of the patch ``data`` by path."""
    files: dict[str, FilePatch] = {}
    preamble, *sections = re.split(r"(?m)^(?=diff --git )", data.decode("utf-8", "surrogateescape"))
    if re.search(r"diff --git |^(@@|---|\+\+\+) ", preamble, re.MULTILINE) or not sections:
        raise _refused("patch-section", "the patch holds no file, or begins with something else")
    for section in sections:
        if not (head := _HEAD.match(section)) or not is_safe(head["path"]):
            raise _refused("patch-section", f"{section.splitlines()[0][:90]!r} does not begin a section that we take")
        path, before = head["path"], head["before"] or ""
        if len({bool(head["new"]), head["old"] == "/dev/null", *([not before.strip("0")] if before else [])}) != 1:
            raise _refused("patch-section", f"the lines above the hunks of {path} disagree on whether it is new")
        pairs = [(f"{old}/".casefold(), f"{path}/".casefold()) for old in files]
        if any(a.startswith(b) or b.startswith(a) for a, b in pairs):
            raise _refused("patch-section", f"{path} comes twice, or as a file and as a folder")
        hunks = tuple(_hunk(path, text) for text in re.split(r"(?m)^(?=@@ )", section[head.end() :])[1:])
        files[path] = FilePatch(path, None if head["new"] else before, head["after"] or "", hunks)
    return files


def _hunk(path: str, text: str) -> Hunk:
    head, lines = _HUNK.match(text), split(text)[1:]
    old, new = ([line[1:] for line in lines if line[0] in marks] for marks in (" -", " +"))
    counts = [1 if count is None else int(count) for count in (head[2], head[4])] if head else []
    hidden = hidden_character("".join(line for line in lines if line[0] == "+"))
    if not head or counts != [len(old), len(new)] or any(line[0] not in " +-" or line[-1] != "\n" for line in lines):
        raise _refused("patch-hunk", f"a hunk of {path} is not as long as it says, or holds what is no line of a file")
    if hidden or (not old and head[1] != "0"):
        raise _refused("patch-hunk", f"a hunk of {path} adds a hidden character ({hidden}), or has no line around it")
    # An empty side is written with the line BEFORE it.
    return int(head[1]) - bool(old), old, int(head[3]) - bool(new), new


def split(text: str) -> list[str]:
    """Return the lines with their ends. Not splitlines(): a form feed or a lone CR ends no line of a patch."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def apply_hunks(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    """Return ``data`` with ``hunks`` applied where they say; refuse one that does not fit, and show both sides."""
    lines, done, at = split(data.decode("utf-8", "surrogateescape")), list[str](), 0
    for number, (start, old, new_start, new) in enumerate(hunks, start=1):
        there = lines[start : start + len(old)]
        done += [*lines[at:start], *new]
        if start < at or there != old or len(done) != new_start + len(new):
            first = next((i for i, (a, b) in enumerate(zip(there, old, strict=False)) if a != b), len(there))
            shown = [f"expects | {line.rstrip()}" for line in old[first : first + 6] or ["(the file's end)"]]
            shown += [f"has     | {line.rstrip()}" for line in there[first : first + 6] or ["(the file's end)"]]
            what = f"hunk {number} of {path} does not fit at line {start + first + 1}"
            raise _refused("hunk-mismatch", what, lines=shown)
        at = start + len(old)
    return "".join(done + lines[at:]).encode("utf-8", "surrogateescape")
