# SPDX-License-Identifier: Apache-2.0
"""Applies hunks at their exact positions: no offset, no fuzz, no whitespace rules."""

from ..errors import NOT_OURS, RESTORE, IntegrityError
from .content import blob_id, short
from .language import CONTEXT_LINES, FilePatch, Hunk, little_context


def forward(file: FilePatch, base: bytes) -> bytes:
    """Returns the result of ``file`` on ``base`` (empty for a new file), checked by its id."""
    return _checked(file.path, file.after, apply_hunks(file.path, file.hunks, base))


def backward(file: FilePatch, result: bytes) -> bytes:
    """Returns the base that ``file`` makes ``result`` from; ``file.before`` must not be None."""
    if not file.cuts:
        return _checked(file.path, file.before, apply_hunks(file.path, inverse(file), result))
    lines = split(result.decode("utf-8"))
    for start, count, base in reversed(file.cuts):
        lines[start : start + count] = base
    return _checked(file.path, file.before, "".join(lines).encode("utf-8"))


def inverse(file: FilePatch) -> tuple[Hunk, ...]:
    """Returns the hunks that undo those of ``file``."""
    return tuple(hunk.inverse() for hunk in file.hunks)


def cuts(file: FilePatch) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Returns what leads back from the result, without the result's own lines: see ``FilePatch.cuts``."""
    return tuple(
        (h.starts[1] - 1 + h.lead, len(h.new) - h.lead - h.trail, h.old[h.lead : len(h.old) - h.trail])
        for h in file.hunks
    )


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
    done: list[str] = []
    at = 0
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
