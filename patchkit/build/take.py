# SPDX-License-Identifier: Apache-2.0
"""Turns a checkout's edits into sources, and merges them with those that are here.

A file may have been edited in the checkout, in the sources here, in both or in neither. The
patch that the checkout was given (or, where that is unknown, the built one) says what each file
was before, so every file is decided on its own; only a file edited on both sides is refused.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckoutStateError
from ..patch.digest import blob_id
from ..patch.language import FilePatch, parse
from ..patch.paths import check_path, check_path_set
from .compose import Sources, check_text
from .git import changed_hunks
from .snapshot import Edits


@dataclass(frozen=True)
class Merge:
    """The merged sources, and which paths came from the checkout."""

    sources: Sources
    taken: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    """Paths whose source here is newer than in the checkout."""


def sources_of(edits: Edits) -> Sources:
    """Returns the checkout's edits as sources; refuses what a patch must not carry."""
    check_path_set(edits.contents)
    new_files, seams = {}, {}
    for path, content in edits.contents.items():
        check_path(path)
        text = check_text(content, path)
        if path in edits.base_contents:
            seams[path] = seam(path, edits.base_contents[path], content)
        else:
            new_files[path] = text
    return Sources(new_files, seams)


def seam(path: str, before: bytes, after: bytes) -> str:
    """Returns the patch section that turns ``before`` into ``after``."""
    with tempfile.TemporaryDirectory() as scratch:
        hunks = changed_hunks(before, after, Path(scratch))
    header = (
        f"diff --git a/{path} b/{path}\nindex {blob_id(before)}..{blob_id(after)} 100644\n--- a/{path}\n+++ b/{path}\n"
    )
    text = header + hunks
    parse(text.encode())
    return text


def merge(ours: Sources, theirs: Sources, given: tuple[FilePatch, ...]) -> Merge:
    """Returns ``ours`` (the sources here) with the edits that ``theirs`` (a checkout) adds.

    Args:
        ours: the sources here.
        theirs: the checkout's edits.
        given: the patch that the checkout started from.

    Raises:
        CheckoutStateError: if a file was edited on both sides, differently.
    """
    before = {file.path: file.after.blob for file in given}
    mine, yours = _results(ours), _results(theirs)
    taken, removed, kept = [], [], []
    for path in sorted(before.keys() | mine.keys() | yours.keys()):
        a, b, origin = mine.get(path), yours.get(path), before.get(path)
        if a == b:
            continue
        if b == origin:
            kept.append(path)
        elif a != origin:
            raise CheckoutStateError("take-both-sides", path=path, ours=_show(a), theirs=_show(b), given=_show(origin))
        else:
            (removed if b is None else taken).append(path)
    new_files = _merged(ours.new_files, theirs.new_files, taken, removed)
    seams = _merged(ours.seams, theirs.seams, taken, removed)
    return Merge(Sources(new_files, seams), tuple(taken), tuple(removed), tuple(kept))


def _results(sources: Sources) -> dict[str, str]:
    """The blob id of each path's result."""
    results = {path: blob_id(text.encode()) for path, text in sources.new_files.items()}
    for path, text in sources.seams.items():
        results[path] = parse(text.encode())[0].after.blob
    return results


def _merged(ours: dict[str, str], theirs: dict[str, str], taken: list[str], removed: list[str]) -> dict[str, str]:
    gone = {*taken, *removed}
    kept = {path: text for path, text in ours.items() if path not in gone}
    return kept | {path: theirs[path] for path in taken if path in theirs}


def _show(blob: str | None) -> str:
    return f"git blob {blob[:12]}" if blob else "no file"
