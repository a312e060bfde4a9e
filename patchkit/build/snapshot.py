# SPDX-License-Identifier: Apache-2.0
"""What a checkout holds against its base, file by file, from bytes on disk and never from git's index.

An index can call a changed file clean (``assume-unchanged``) and does not know new files.
"""

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckoutStateError, quoted
from ..patch.content import blob_id
from ..patch.paths import PREFIX
from ..tree.checkout import VERSION_FILE
from .git import run_git
from .sources import PACKAGE, check_mode

Listing = dict[str, tuple[str, str]]
"""For each path its git mode and blob id."""


@dataclass(frozen=True)
class Edits:
    """What a checkout changed: each file's new content, and the base's of those that the base has.

    ``left_out`` are untracked files that are ignored by git or lie outside verl/.
    """

    contents: dict[str, bytes]
    base_contents: dict[str, bytes]
    left_out: tuple[str, ...] = ()


def edits_of_archive(root: Path, base: Path) -> Edits:
    """Returns the edits of a tree without git (an unpacked archive, an installed package)."""

    def listed(tree: Path) -> Listing:
        places = (place for place in sorted((tree / "verl").rglob("*")) if place.is_symlink() or not place.is_dir())
        paths = (place.relative_to(tree).as_posix() for place in places)
        # A clone, an archive and a wheel each say their own version.
        return _read_all(tree, (path for path in paths if not _is_cache(path) and path != VERSION_FILE), {})

    return _compare(
        root, listed(base), listed(root), lambda p: (base / p).read_bytes(), lambda p: (root / p).read_bytes()
    )


def edits_of_clone(root: Path, base_rev: str, head_rev: str | None) -> Edits:
    """Returns the edits of a clone since the commit ``base_rev``.

    They are those of the commit ``head_rev``; for None those of the work tree, with what is committed, staged, changed
    and new in it.
    """
    base, head = _list_commit(root, base_rev), _list_commit(root, head_rev or "HEAD")
    if not descends(root, base_rev, head_rev or "HEAD"):
        what, cause = f"{root} is not at the base, nor on top of it", "Another version of verl is checked out."
        next_ = f"git -C {quoted(root)} worktree add DIR {base_rev}   (make the edits there)"
        raise CheckoutStateError("take-wrong-commit", what, cause, next_)

    def blob_of(listing: Listing) -> Callable[[str], bytes]:
        return lambda path: run_git(root, "cat-file", "blob", listing[path][1])

    if head_rev is not None:
        return _compare(root, base, head, blob_of(base), blob_of(head))
    others = set(_names(root, "--others", "--exclude-standard"))
    ignored = set(_names(root, "--others", "--ignored", "--exclude-standard", "--", "verl"))
    # Our own new files are taken even where git is told to ignore them.
    wanted = {path for path in others if path.startswith(PREFIX)} | {p for p in ignored if p.startswith(PACKAGE)}
    wanted = {path for path in wanted if not _is_cache(path)}
    present = sorted(path for path in {*_names(root, "--cached"), *base, *wanted} if os.path.lexists(root / path))
    current = _read_all(root, present, base)
    left_out = sorted(path for path in (others | ignored) - wanted if not _is_cache(path))
    found = _compare(root, base, current, blob_of(base), lambda path: (root / path).read_bytes())
    return Edits(found.contents, found.base_contents, tuple(left_out))


def _compare(
    root: Path, base: Listing, current: Listing, original: Callable[[str], bytes], content: Callable[[str], bytes]
) -> Edits:
    edits = Edits({}, {})
    for path in sorted(path for path in base.keys() | current.keys() if base.get(path) != current.get(path)):
        undo = f"git -C {quoted(root)} checkout -- {quoted(path)}"
        if not path.startswith(PREFIX):
            what, cause = f"{path} was changed, which lies outside verl/", "The patch carries verl's package only."
            raise CheckoutStateError("take-outside", what, cause, f"Keep it in a branch of its own, or: {undo}")
        if path not in current:
            what, cause = f"{path} was deleted in the checkout", "Our patches never delete verl's files."
            raise CheckoutStateError("take-deleted", what, cause, undo)
        check_mode(path, current[path][0], base.get(path, ("100644", ""))[0])
        edits.contents[path] = content(path)
        if path in base:
            edits.base_contents[path] = original(path)
    return edits


def _read_all(root: Path, paths: Iterable[str], base: Listing) -> Listing:
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
    return listing


def _list_commit(root: Path, rev: str) -> Listing:
    commit = resolve_commit(root, rev)
    if not commit:
        what, cause = f"{root} has no commit {rev}", "A shallow clone, or a clone of another repository."
        raise CheckoutStateError("take-no-commit", what, cause, f"git -C {quoted(root)} fetch origin {quoted(rev)}")
    entries = run_git(root, "ls-tree", "-r", "-z", "--full-tree", commit).decode("utf-8").split("\0")[:-1]
    split = ((*entry.split("\t", 1)[0].split(" "), entry.split("\t", 1)[1]) for entry in entries)
    return {path: (mode, blob) for mode, _, blob, path in split}


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
