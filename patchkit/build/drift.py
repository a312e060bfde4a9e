# SPDX-License-Identifier: Apache-2.0
"""Says of any verl tree which seams still fit and which lines moved: what one needs to port the patch to a fork."""

from pathlib import Path

from ..patch.content import blob_id
from ..patch.language import FilePatch, Hunk, parse
from ..patch.splice import split
from .sources import Sources


def table(sources: Sources, tree: Path) -> list[tuple[str, str, str]]:
    """Returns for each seam its path, ``same``, ``fits``, ``moved``, ``conflict`` or ``missing``, and where."""
    return [(path, *_judge(parse(text.encode())[0], tree / path)) for path, text in sorted(sources.seams.items())]


def _judge(file: FilePatch, place: Path) -> tuple[str, str]:
    if not place.is_file():
        return "missing", "verl has no such file there"
    data = place.read_bytes()
    if blob_id(data) in (file.before, file.after):
        return "same", "" if blob_id(data) == file.before else "and the patch is on"
    lines, shift, moved, said = split(data.decode("utf-8", "replace")), 0, [], []
    for number, hunk in enumerate(file.hunks, start=1):
        start = hunk.old_start - 1
        count = len(hunk.old)
        places = [at for at in range(len(lines) - count + 1) if tuple(lines[at : at + count]) == hunk.old]
        if places:
            shift = min((at - start for at in places), key=lambda by: abs(by - shift))
            if shift:
                moved.append(f"hunk {number} by {shift:+d} lines" + (f" ({len(places)} places)" if places[1:] else ""))
        else:
            said.append(f"hunk {number} " + _mismatch(hunk, lines, start + shift))
    return ("conflict", "; ".join(said + moved)) if said else ("moved", ", ".join(moved)) if moved else ("fits", "")


def _mismatch(hunk: Hunk, lines: list[str], start: int) -> str:
    """Says where the hunk stops to fit, at the place where most of its lines stand near ``start``."""

    def fit(at: int) -> int:
        return sum(a == b for a, b in zip(hunk.old, lines[max(at, 0) :], strict=False))

    at = max(range(max(0, start - 200), min(len(lines), start + 200) + 1), key=lambda at: (fit(at), -abs(at - start)))
    index = next((i for i, line in enumerate(hunk.old) if lines[at + i : at + i + 1] != [line]), 0)
    found = (lines[at + index : at + index + 1] or ["the file's end"])[0].strip()[:50]
    return f"at line {at + index + 1}: expects {hunk.old[index].strip()[:50]!r}, there is {found!r}"
