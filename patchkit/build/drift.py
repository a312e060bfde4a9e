# SPDX-License-Identifier: Apache-2.0
"""Which seams fit a verl that they were not made for, and where: to build for it, or to port the patch to a fork."""

from pathlib import Path

from ..patch.content import blob_id
from ..patch.language import FilePatch, Hunk
from ..patch.splice import split


def relocate(file: FilePatch, data: bytes) -> bytes | None:
    """Returns the result of ``file`` on ``data``, not its base; None unless each hunk fits at just one place."""
    lines, done, at = split(data.decode("utf-8")), [], 0
    for hunk in file.hunks:
        places = _places(hunk, lines)
        if len(places) != 1 or places[0] < at:
            return None
        done += [*lines[at : places[0]], *hunk.new]
        at = places[0] + len(hunk.old)
    return "".join(done + lines[at:]).encode("utf-8")


def judge(file: FilePatch, place: Path) -> tuple[str, str]:
    """Returns ``same``, ``fits``, ``moved``, ``conflict`` or ``missing`` for the file at ``place``, and where."""
    if not place.is_file():
        return "missing", "verl has no such file there"
    data = place.read_bytes()
    if blob_id(data) in (file.before, file.after):
        return "same", "" if blob_id(data) == file.before else "and the patch is on"
    lines, shift, moved, said = split(data.decode("utf-8", "replace")), 0, [], []
    for number, hunk in enumerate(file.hunks, start=1):
        start, places = hunk.old_start - 1, _places(hunk, lines)
        if places:
            shift = min((at - start for at in places), key=lambda by: abs(by - shift))
            if shift:
                moved.append(f"hunk {number} by {shift:+d} lines" + (f" ({len(places)} places)" if places[1:] else ""))
        else:
            said.append(f"hunk {number} " + _mismatch(hunk, lines, start + shift))
    return ("conflict", "; ".join(said + moved)) if said else ("moved", ", ".join(moved)) if moved else ("fits", "")


def _places(hunk: Hunk, lines: list[str]) -> list[int]:
    """Where the hunk's old lines stand, all of them, counted from 0."""
    count, old = len(hunk.old), list(hunk.old)
    return [at for at in range(len(lines) - count + 1) if lines[at] == old[0] and lines[at : at + count] == old]


def _mismatch(hunk: Hunk, lines: list[str], start: int) -> str:
    """Says where the hunk stops to fit, at the place where most of its lines stand near ``start``."""

    def fit(at: int) -> int:
        return sum(a == b for a, b in zip(hunk.old, lines[max(at, 0) :], strict=False))

    at = max(range(max(0, start - 200), min(len(lines), start + 200) + 1), key=lambda at: (fit(at), -abs(at - start)))
    index = next((i for i, line in enumerate(hunk.old) if lines[at + i : at + i + 1] != [line]), 0)
    found = (lines[at + index : at + index + 1] or ["the file's end"])[0].strip()[:50]
    return f"at line {at + index + 1}: expects {hunk.old[index].strip()[:50]!r}, there is {found!r}"
