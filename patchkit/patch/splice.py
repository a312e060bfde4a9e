# SPDX-License-Identifier: Apache-2.0
"""Applies hunks at their exact positions: no offset, no fuzz, no whitespace rules."""

from ..errors import IntegrityError
from .digest import Digest
from .language import CONTEXT_LINES, FilePatch, Hunk


def forward(file: FilePatch, base: bytes) -> bytes:
    """Returns the result of ``file`` on ``base`` (empty for a new file), checked by its digest."""
    return _checked(file.path, file.after, _splice(file.path, file.hunks, base))


def backward(file: FilePatch, result: bytes) -> bytes:
    """Returns the base that ``file`` makes ``result`` from; ``file.before`` must not be None."""
    hunks = tuple(hunk.inverse() for hunk in file.hunks)
    return _checked(file.path, file.before, _splice(file.path, hunks, result))


def _checked(path: str, expected: Digest | None, data: bytes) -> bytes:
    if expected is None or not expected.admits(data):
        wanted = expected.short() if expected else "no file"
        found = Digest.of(data)
        by = found.short() if expected and expected.sha256 else f"git blob {found.blob[:12]}"
        raise IntegrityError("result-digest", path=path, expected=wanted, found=by)
    return data


def _splice(path: str, hunks: tuple[Hunk, ...], data: bytes) -> bytes:
    try:
        # Not splitlines(): a form feed or a lone CR inside a line ends no line of a patch.
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise IntegrityError("result-not-utf8", path=path) from error
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    done: list[str] = []
    at = 0
    for number, hunk in enumerate(hunks, start=1):
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        end = start + len(hunk.old)
        found = tuple(lines[start:end])
        if found != hunk.old:
            index = next(
                (i for i, (a, b) in enumerate(zip(found, hunk.old, strict=False)) if a != b),
                len(found),
            )
            raise IntegrityError(
                "hunk-mismatch",
                path=path,
                hunk=number,
                line=start + index + 1,
                expected=hunk.old[index].rstrip("\n"),
                found=found[index].rstrip("\n") if index < len(found) else "the file's end",
            )
        if hunk.trail < CONTEXT_LINES and end != len(lines):
            raise IntegrityError("patch-context", path=path, line=hunk.line)
        done += lines[at:start]
        done += hunk.new
        at = end
    return "".join(done + lines[at:]).encode("utf-8")
