# SPDX-License-Identifier: Apache-2.0
"""What a checkout holds against its base, as sources, and how they merge with those that are here.

It is read from the disk, never from git's index, which can call a changed file clean. Each file is decided on its own,
by what the checkout was given; where nothing says what that was, an older build would look like edits.
"""

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..apply.library import Library
from ..errors import CheckoutStateError, program, quoted
from ..patch.content import PREFIX, blob_id, check_path, check_path_set, read_regular, short
from ..patch.language import MAX_BYTES, parse
from ..tree.checkout import VERSION_FILE, Checkout
from ..tree.survey import State, survey
from ..tree.transaction import KEPT_PATCH
from .seams import run_git, seam
from .sources import PACKAGE, Sources, check_mode, check_text

Listing = dict[str, tuple[str, str]]  # for each path its git mode and blob id


@dataclass(frozen=True)
class Side:
    """A tree as it was or is, and how a file of it is read."""

    listing: Listing
    read: Callable[[str], bytes]


@dataclass(frozen=True)
class Edits:
    """What a checkout changed: new contents, the base's where it has the file, and what is ignored or outside verl/."""

    contents: dict[str, bytes]
    base_contents: dict[str, bytes]
    left_out: tuple[str, ...]


def edits_of_archive(root: Path, base: Path) -> Edits:
    """Returns the edits of a tree without git (an unpacked archive, an installed package)."""

    def side(tree: Path) -> Side:
        places = (place for place in sorted((tree / "verl").rglob("*")) if place.is_symlink() or not place.is_dir())
        paths = (place.relative_to(tree).as_posix() for place in places)
        # A clone, an archive and a wheel each say their own version.
        return _on_disk(tree, (path for path in paths if not _is_cache(path) and path != VERSION_FILE), {})

    return _compare(root, side(base), side(root))


def edits_of_clone(root: Path, base_rev: str, head_rev: str | None) -> Edits:
    """Returns the edits of a clone since ``base_rev``: of a commit, or for None all that is in the work tree."""
    base, head = _committed(root, base_rev), _committed(root, head_rev or "HEAD")
    if not descends(root, base_rev, head_rev or "HEAD"):
        what, cause = f"{root} is not at the base, nor on top of it", "Another version of verl is checked out."
        next_ = f"git -C {quoted(root)} worktree add DIR {base_rev}   (make the edits there)"
        raise CheckoutStateError("take-wrong-commit", what, cause, next_)

    if head_rev is not None:
        return _compare(root, base, head)
    others = set(_names(root, "--others", "--exclude-standard"))
    ignored = set(_names(root, "--others", "--ignored", "--exclude-standard", "--", "verl"))
    # Our own new files are taken even where git is told to ignore them.
    wanted = {path for path in others if path.startswith(PREFIX)} | {p for p in ignored if p.startswith(PACKAGE)}
    wanted = {path for path in wanted if not _is_cache(path)}
    present = sorted(
        path for path in {*_names(root, "--cached"), *base.listing, *wanted} if os.path.lexists(root / path)
    )
    left_out = sorted(path for path in (others | ignored) - wanted if not _is_cache(path))
    return _compare(root, base, _on_disk(root, present, base.listing), left_out)


def _compare(root: Path, base: Side, current: Side, left_out: Iterable[str] = ()) -> Edits:
    before, now, edits = base.listing, current.listing, Edits({}, {}, tuple(left_out))
    for path in sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path)):
        undo = f"git -C {quoted(root)} checkout -- {quoted(path)}"
        if not path.startswith(PREFIX):
            what, cause = f"{path} was changed, which lies outside verl/", "The patch carries verl's package only."
            raise CheckoutStateError("take-outside", what, cause, f"Keep it in a branch of its own, or: {undo}")
        if path not in now:
            what, cause = f"{path} was deleted in the checkout", "Our patches never delete verl's files."
            raise CheckoutStateError("take-deleted", what, cause, undo)
        check_mode(path, now[path][0], before.get(path, ("100644", ""))[0])
        edits.contents[path] = current.read(path)
        if path in before:
            edits.base_contents[path] = base.read(path)
    return edits


def _on_disk(root: Path, paths: Iterable[str], base: Listing) -> Side:
    """Reads files' modes and ids; a link's content is where it points, a submodule of verl's is not looked into."""
    listing = {}
    for path in paths:
        mode = (root / path).lstat().st_mode
        if base.get(path, ("", ""))[0] == "160000":
            listing[path] = base[path]
        elif stat.S_ISREG(mode):
            listing[path] = ("100755" if mode & 0o100 else "100644", blob_id((root / path).read_bytes()))
        else:
            target = os.readlink(root / path) if stat.S_ISLNK(mode) else ""
            listing[path] = ("120000" if target else "0", blob_id(os.fsencode(target)))
    return Side(listing, lambda path: (root / path).read_bytes())


def _committed(root: Path, rev: str) -> Side:
    commit = resolve_commit(root, rev)
    if not commit:
        what, cause = f"{root} has no commit {rev}", "A shallow clone, or a clone of another repository."
        raise CheckoutStateError("take-no-commit", what, cause, f"git -C {quoted(root)} fetch origin {quoted(rev)}")
    entries = run_git(root, "ls-tree", "-r", "-z", "--full-tree", commit).decode("utf-8").split("\0")[:-1]
    split = ((*entry.split("\t", 1)[0].split(" "), entry.split("\t", 1)[1]) for entry in entries)
    listing = {path: (mode, blob) for mode, _, blob, path in split}
    return Side(listing, lambda path: run_git(root, "cat-file", "blob", listing[path][1]))


def resolve_commit(root: Path, rev: str) -> str:
    """Returns the full id of a commit of the clone at ``root``; an empty text if there is none."""
    options = ("--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    return run_git(root, "rev-parse", *options, allowed=(0, 1, 128)).decode().strip()


def descends(root: Path, base_rev: str, head_rev: str) -> bool:
    """True if the commit ``head_rev`` is ``base_rev`` or lies on top of it."""
    base, head = resolve_commit(root, base_rev), resolve_commit(root, head_rev)
    return bool(base and head) and run_git(root, "merge-base", base, head, allowed=(0, 1)).decode().strip() == base


def _names(root: Path, *arguments: str) -> list[str]:
    return run_git(root, "ls-files", "-z", *arguments).decode("utf-8", "surrogateescape").split("\0")[:-1]


def _is_cache(path: str) -> bool:
    return path.endswith((".pyc", ".pyo")) or any(part.startswith((".", "__pycache__")) for part in path.split("/"))


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
    """Returns what the checkout was given: each file's id, by path; refuses where nothing says what that was."""
    try:
        return {file.path: file.after for file in parse(read_regular(checkout.state_folder / KEPT_PATCH, MAX_BYTES))}
    except FileNotFoundError:
        tree = survey(checkout, Library(patches).families)
    if tree.state in (State.PRISTINE, State.APPLIED, State.OTHER_VERSION):
        return {path: file.after for path, file in tree.edition.files.items()} if tree.edition else {}
    what = f"which build of the patch {checkout.root} was given is unknown: an older build would look like edits"
    cause = "The copy that apply_patch.py leaves in a checkout is gone, or the patch was put on by other means."
    next_ = f"{program()} --repo FRESH on a fresh checkout (--patch-file PATCH for another build); edit there"
    raise CheckoutStateError("take-origin-unknown", what, cause, next_, found=tree.state.name)


def merge(ours: Sources, theirs: Sources, before: dict[str, str]) -> tuple[Sources, list[str], list[str], list[str]]:
    """Returns ``ours`` with the edits that ``theirs`` adds to its ``origin``, and the paths taken, removed and kept."""
    mine, yours = _results(ours), _results(theirs)
    taken, removed, kept = list[str](), list[str](), list[str]()
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
    return sources, taken, removed, kept


def _results(sources: Sources) -> dict[str, str]:
    """The blob id of each path's result."""
    results = {path: blob_id(text.encode()) for path, text in sources.new_files.items()}
    return results | {path: parse(text.encode())[0].after for path, text in sources.seams.items()}
