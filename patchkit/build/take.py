# SPDX-License-Identifier: Apache-2.0
"""Turns a checkout's edits into sources, and merges them with those that are here.

A file may have been edited in the checkout, in the sources here, in both or in neither. The patch that the checkout was
given says what each file was before, so every file is decided on its own; only a file edited on both sides is refused.
Where nothing says which patch that was, nothing is taken: an older build would look like an edit of everything.
"""

from dataclasses import dataclass
from pathlib import Path

from ..apply.applier import KEPT_PATCH
from ..apply.library import Library
from ..errors import CheckoutStateError, program
from ..patch.content import blob_id, read_regular, short
from ..patch.language import MAX_BYTES, parse
from ..patch.paths import check_path, check_path_set
from ..tree.checkout import Checkout
from ..tree.survey import State, survey
from .git import seam
from .snapshot import Edits
from .sources import Sources, check_text


@dataclass(frozen=True)
class Merge:
    """The merged sources; the paths that came from the checkout; those whose source here is newer than in it."""

    sources: Sources
    taken: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def sources_of(edits: Edits) -> Sources:
    """Returns the checkout's edits as sources; refuses what a patch must not carry."""
    check_path_set(edits.contents)
    sources = Sources({}, {})
    for path, content in edits.contents.items():
        check_path(path)
        text = check_text(content, path)
        if path in edits.base_contents:
            sources.seams[path] = seam(path, edits.base_contents[path], content)
        else:
            sources.new_files[path] = text
    return sources


def origin(checkout: Checkout, patches: Path) -> dict[str, str]:
    """Returns what the checkout was given: the id of each file, by path.

    Raises:
        CheckoutStateError: if neither a copy in the checkout nor its content says which patch that was.
    """
    try:
        return {file.path: file.after for file in parse(read_regular(checkout.state_folder / KEPT_PATCH, MAX_BYTES))}
    except FileNotFoundError:
        found = survey(checkout, Library(patches).families)
    if found.state in (State.PRISTINE, State.APPLIED, State.OTHER_VERSION):
        return {path: file.after for path, file in found.edition.files.items()} if found.edition else {}
    what = f"which build of the patch {checkout.root} was given is unknown: an older build would look like edits"
    cause = "The copy that apply_patch.py leaves in a checkout is gone, or the patch was put on by other means."
    next_ = f"{program()} --repo FRESH on a fresh checkout (--patch-file PATCH for another build); edit there"
    raise CheckoutStateError("take-origin-unknown", what, cause, next_, found=found.state.name)


def merge(ours: Sources, theirs: Sources, before: dict[str, str]) -> Merge:
    """Returns ``ours`` (the sources here) with the edits that ``theirs`` (a checkout) adds to ``before`` (``origin``).

    Raises:
        CheckoutStateError: if a file was edited on both sides, differently.
    """
    mine, yours = _results(ours), _results(theirs)
    taken, removed, kept = [], [], []
    for path in sorted(before.keys() | mine.keys() | yours.keys()):
        a, b, given = mine.get(path), yours.get(path), before.get(path)
        if a != b and b == given:
            kept.append(path)
        elif a != b and a != given:
            what = f"{path} was edited in the checkout and in the sources here, differently"
            cause = "Someone edited gradloc/ or verl_overrides/ directly, or took another checkout's edits since."
            next_ = "Bring both edits together in the checkout, undo the one here with git checkout, run this again."
            found = f"{short(b)} in the checkout, {short(a)} in the sources, {short(given)} was given"
            raise CheckoutStateError("take-both-sides", what, cause, next_, found=found)
        elif a != b:
            (removed if b is None else taken).append(path)

    def merged(here: dict[str, str], there: dict[str, str]) -> dict[str, str]:
        kept_here = {path: text for path, text in here.items() if path not in {*taken, *removed}}
        return kept_here | {path: there[path] for path in taken if path in there}

    sources = Sources(merged(ours.new_files, theirs.new_files), merged(ours.seams, theirs.seams))
    return Merge(sources, tuple(taken), tuple(removed), tuple(kept))


def _results(sources: Sources) -> dict[str, str]:
    """The blob id of each path's result."""
    results = {path: blob_id(text.encode()) for path, text in sources.new_files.items()}
    return results | {path: parse(text.encode())[0].after for path, text in sources.seams.items()}
