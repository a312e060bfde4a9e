# SPDX-License-Identifier: Apache-2.0
"""Reads a patch, strictly: exactly the language that ``make_patch.sh`` writes; applies it at its exact lines.

An optional preamble, then per file, in sorted order: ``diff --git``, ``new file mode 100644`` for a new file, ``index``
with two full blob ids, ``---``, ``+++`` and hunks with exact counts. All else is refused by line number.
"""

import re
from dataclasses import dataclass
from typing import Any

from ..errors import BUILT, DO_NOT_USE, GET_AGAIN, NOT_OURS, RESTORE, IntegrityError
from .content import ABSENT, blob_id, check_path, check_path_set, hidden_character, short

MAX_BYTES = 5 * 2**20
MAX_PREAMBLE_LINES = 64
CONTEXT_LINES = 3
_DIFF = re.compile(r"diff --git a/(.*) b/(.*)\Z")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})( 100644)?\Z")
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@( .*)?\Z")
_NO_NEWLINE = "\\ No newline at end of file"


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

    @property
    def inverse(self) -> tuple[Hunk, ...]:
        """The hunks that undo this."""
        return tuple(Hunk(h.new_start, h.new, h.old_start, h.old, h.lead, h.trail, h.line) for h in self.hunks)


def parse(data: bytes, is_hollow: bool = False) -> tuple[FilePatch, ...]:
    """Returns the sections of the patch ``data``; IntegrityError says which line is outside the language.

    Where it ``is_hollow`` the text of new files is left out: see :func:`patchkit.patch.manifest.remembered`.
    """
    _check_bytes(data)
    reader = _Reader(data.decode("utf-8").split("\n")[:-1])
    reader.skip_preamble()
    files = []
    while reader.number < len(reader.lines):
        files.append(_read_file(reader, is_hollow))
    paths = [file.path for file in files]
    check_path_set(paths)
    for previous, path in zip(paths, paths[1:], strict=False):
        if path < previous:
            raise reader.refusal("patch-unsorted", f"the patch's sections are not in order: {path} after {previous}")
    return tuple(files)


_LOOKS = (
    (rb"\x1f\x8b|PK\x03\x04|BZh|\xfd7zXZ", "patch-compressed", "is compressed", "An archive was named so."),
    (rb"\xff\xfe|\xfe\xff|\0|.\0", "patch-utf16", "is UTF-16", "A shell redirection re-encoded it."),
    (rb"\xef\xbb\xbf", "patch-bom", "begins with a byte order mark", "An editor saved it again."),
    (rb"\s*<(!doctype|html|\?xml)", "patch-html", "is a web page", "A server sent a page, not the raw file."),
    (rb"\Z", "patch-empty", "is empty", "A download failed unnoticed."),
    (rb"[^\0]*\0", "patch-nul", "holds a NUL", NOT_OURS),
    (rb"[^\r]*\r", "patch-crlf", "has CRLF line ends", "git converted it: '*.patch -text' in .gitattributes."),
    (rb"(?s:.*)[^\n]\Z", "patch-no-final-newline", "ends without a line end", "The file was cut off."),
)


def _check_bytes(data: bytes) -> None:
    """Refuses what is not non-empty UTF-8 text with LF and a final newline; names what it looks like."""
    for pattern, reason, what, cause in _LOOKS:
        found = re.match(pattern, data, re.IGNORECASE)
        if found:
            line = found.end() and data[: found.end() - 1].count(b"\n") + 1
            raise IntegrityError(reason, f"the patch {what} (line {line})", cause, GET_AGAIN, line=line)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"line {data[: error.start].count(10) + 1} of the patch is not UTF-8"
        raise IntegrityError("patch-not-utf8", what, NOT_OURS, GET_AGAIN) from error


class _Reader:
    """The patch's lines, with a cursor."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.number = lines, 0

    def refusal(self, reason: str, what: str, cause: str = NOT_OURS, next_: str = BUILT, **data: Any) -> IntegrityError:
        return IntegrityError(reason, f"line {data.setdefault('line', self.number)}: {what}", cause, next_, **data)

    def unknown(self, found: str) -> IntegrityError:
        return self.refusal("patch-unknown-line", "this is no part of the patch language", found=found[:80])

    def peek(self) -> str | None:
        return self.lines[self.number] if self.number < len(self.lines) else None

    def take(self) -> str:
        if self.number >= len(self.lines):
            raise self.refusal("patch-truncated", "the patch ends in the middle", "The file was cut off.", GET_AGAIN)
        self.number += 1
        return self.lines[self.number - 1]

    def skip_preamble(self) -> None:
        for number, line in enumerate(self.lines):
            self.number = number
            if line.startswith("diff --git "):
                return
            if line.startswith(("--- ", "+++ ", "@@ ", "diff ")) or number >= MAX_PREAMBLE_LINES:
                what, cause = "only git's own form of a diff is read", "It is a context, ed or plain diff."
                raise self.refusal("patch-dialect", what, cause, line=self.number + 1, found=line[:60])
        raise self.refusal("patch-no-files", "'diff --git' never occurs in the patch", "It is another file.")


def _read_file(reader: _Reader, is_hollow: bool) -> FilePatch:
    header = reader.take()
    match = _DIFF.match(header)
    if not match:
        raise reader.unknown(header)
    path = match[1]
    check_path(path)
    is_new = _read_mode(reader, path)
    before, after = _read_index(reader, path, is_new)
    if is_new and is_hollow:
        return FilePatch(path, None, after, ())
    wanted = ("--- " + ("/dev/null" if is_new else f"a/{path}"), f"+++ b/{path}")
    for expected, found in ((path, match[2]), *((line, reader.take()) for line in wanted)):
        if found != expected:
            if found[:4] != expected[:4] and expected != path:
                raise reader.unknown(found)
            what = "the patch names another file than its section"
            raise reader.refusal("patch-names-disagree", what, expected=expected, found=found[:80])
    return FilePatch(path, before, after, _read_hunks(reader, path, is_new))


_SPECIAL = (
    ("new file mode 120000", "type-symlink", "makes {} a symbolic link", "Links lead a writer out of the tree."),
    ("new file mode 160000", "type-gitlink", "makes {} a submodule", NOT_OURS),
    (("new file mode ", "old mode ", "new mode "), "mode-refused", "sets a mode for {}", "Only 100644 is allowed."),
    ("deleted file mode ", "patch-deletes", "deletes {}", "Our patches never delete verl's files."),
    (("similarity ", "dissimilarity ", "rename ", "copy "), "patch-renames", "renames or copies {}", NOT_OURS),
    (("GIT binary patch", "Binary files "), "patch-binary", "holds binary data for {}", NOT_OURS),
)


def _read_mode(reader: _Reader, path: str) -> bool:
    """True for a new file of mode 100644, False where no mode line stands; else raises."""
    line = reader.peek() or ""
    if line == "new file mode 100644":
        reader.take()
        return True
    for marks, reason, what, cause in _SPECIAL:
        if line.startswith(marks):
            raise reader.refusal(reason, f"the patch {what.format(path)}", cause, DO_NOT_USE, line=reader.number + 1)
    return False


def _read_index(reader: _Reader, path: str, is_new: bool) -> tuple[str | None, str]:
    text = reader.take()
    match = _INDEX.match(text)
    if re.match(r"index .* 1(00755|20000|60000|04755|00777)\Z", text):
        raise reader.refusal("mode-refused", f"the patch sets a file mode for {path}", "Only 100644 is allowed.")
    if not match:
        if not re.match(r"index [0-9a-f]{4,40}\.\.[0-9a-f]{4,40}( 100644)?\Z", text):
            raise reader.unknown(text)
        cause = "It was made by git diff without --full-index, so its base and its result cannot be verified."
        next_ = "Make it again with: bash make_patch.sh --repo CHECKOUT --output FILE"
        raise reader.refusal("patch-abbreviated", f"{path} is named by an abbreviated id", cause, next_, found=text)
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


def _miscounted(reader: _Reader, path: str) -> IntegrityError:
    what = f"a hunk of {path} is longer or shorter than its header says"
    return reader.refusal("patch-count", what, "The patch was edited by hand.")


def _check_place(reader: _Reader, hunk: Hunk, previous: Hunk | None, path: str) -> None:
    """Hunks ascend, do not overlap, agree on the shift so far, and carry git's context, but for the file's ends."""
    end, shift = 1, 0
    if previous is not None:
        if previous.trail < CONTEXT_LINES:
            raise little_context(path, previous.line)
        old_at, new_at = previous.starts
        end = old_at + len(previous.old)
        shift = new_at - old_at + len(previous.new) - len(previous.old)
    old_at, new_at = hunk.starts
    if old_at < end or new_at != old_at + shift:
        what = f"the hunks of {path} overlap, descend or disagree on line numbers"
        raise reader.refusal("patch-hunk-order", what, line=hunk.line)
    if hunk.lead < CONTEXT_LINES and old_at != 1:
        raise little_context(path, hunk.line)


def little_context(path: str, line: int) -> IntegrityError:
    """Returns the refusal of a hunk whose place cannot be verified."""
    what = f"line {line}: a hunk of {path} has less than three lines of context"
    return IntegrityError("patch-context", what, "It was made with -U0 or the like.", BUILT, path=path, line=line)


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
            raise reader.refusal("patch-hidden-character", what, cause, DO_NOT_USE, found=found)
        marks.append(mark)
        ending = "" if reader.peek() == _NO_NEWLINE and reader.take() else "\n"
        if mark == "+" and not ending:
            raise reader.refusal("patch-result-newline", f"the patch leaves {path} without a final newline")
        if mark != "+":
            old.append(text[1:] + ending)
        if mark != "-":
            new.append(text[1:] + ending)
    if len(old) != old_count or len(new) != new_count:
        raise _miscounted(reader, path)
    if set(marks) <= {" "}:
        raise reader.refusal("patch-no-hunks", f"a hunk of {path} changes nothing", line=line)
    changes = [index for index, mark in enumerate(marks) if mark != " "]
    lead, trail = changes[0], len(marks) - 1 - changes[-1]
    return Hunk(int(match[1]), tuple(old), int(match[3]), tuple(new), lead, trail, line)


def forward(file: FilePatch, base: bytes) -> bytes:
    """Returns the result of ``file`` on ``base`` (empty for a new file), checked by its id."""
    return _checked(file.path, file.after, apply_hunks(file.path, file.hunks, base))


def backward(file: FilePatch, result: bytes) -> bytes:
    """Returns the base that ``file`` makes ``result`` from; ``file.before`` must not be None."""
    return _checked(file.path, file.before, apply_hunks(file.path, file.inverse, result))


def split(text: str) -> list[str]:
    """Returns the lines with their ends. Not splitlines(): a form feed or a lone CR ends no line of a patch."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _checked(path: str, expected: str | None, data: bytes) -> bytes:
    found = blob_id(data)
    if found != expected:
        what = f"{path} would not become what the patch promises"
        ids = {"expected": short(expected), "found": short(found)}
        raise IntegrityError("result-digest", what, NOT_OURS, RESTORE, path=path, **ids)
    return data


def apply_hunks(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    """Returns ``data`` with ``hunks`` applied where they say, or raises IntegrityError."""
    try:
        lines = split(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8"
        raise IntegrityError("result-not-utf8", what, "It is not verl's file.", "Restore it from verl.") from error
    done, at = list[str](), 0
    for number, hunk in enumerate(hunks, start=1):
        start = hunk.starts[0] - 1
        end = start + len(hunk.old)
        found = tuple(lines[start:end])
        if found != hunk.old:
            pairs = enumerate(zip(found, hunk.old, strict=False))
            index = next((i for i, (a, b) in pairs if a != b), len(found))
            what = f"hunk {number} of {path} does not fit at line {start + index + 1}"
            cause, next_ = "The file is not the one that the patch was made for.", "Restore it from verl."
            data_ = {"expected": hunk.old[index].rstrip("\n"), "hunk": number, "line": start + index + 1}
            there = found[index].rstrip("\n") if index < len(found) else "the file's end"
            raise IntegrityError("hunk-mismatch", what, cause, next_, found=there, **data_)
        if hunk.trail < CONTEXT_LINES and end != len(lines):
            raise little_context(path, hunk.line)
        done += lines[at:start]
        done += hunk.new
        at = end
    return "".join(done + lines[at:]).encode("utf-8")
