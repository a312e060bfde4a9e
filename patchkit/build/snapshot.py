# SPDX-License-Identifier: Apache-2.0
"""What a checkout holds against its base, file by file, from bytes on disk and never from git's
index: an index can call a changed file clean (``assume-unchanged``) and does not know new files.
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
from .sources import PACKAGE, not_plain, wrong_mode

Listing = dict[str, tuple[str, str]]
"""For each path its git mode and blob id."""


@dataclass(frozen=True)
class Edits:
    """What a checkout changed: the new content of each file, and what was left aside."""

    contents: dict[str, bytes]
    base_contents: dict[str, bytes]
    """The base's content of each edited file that the base has."""
    left_out: tuple[str, ...] = ()
    """Untracked files that are ignored by git or lie outside verl/."""


def edits_of_archive(root: Path, base: Path) -> Edits:
    """Returns the edits of a tree without git (an unpacked archive, an installed package)."""

    def listed(tree: Path) -> Listing:
        places = (place for place in sorted((tree / "verl").rglob("*")) if place.is_symlink() or not place.is_dir())
        paths = (place.relative_to(tree).as_posix() for place in places)
        # A clone, an archive and a wheel each say their own version.
        return _read_all(tree, (path for path in paths if not _is_cache(path) and path != VERSION_FILE))

    originals, current = listed(base), listed(root)
    return _compare(
        root, originals, current, lambda path: (base / path).read_bytes(), lambda p: (root / p).read_bytes()
    )


def edits_of_clone(root: Path, base_rev: str, head_rev: str | None) -> Edits:
    """Returns the edits of a clone since ``base_rev``.

    Args:
        root: the work tree.
        base_rev: the commit that the patch is for.
        head_rev: a commit to take the edits from; None takes the work tree, with what is
            committed, staged, changed and new in it.
    """
    base, head = _list_commit(root, base_rev), _list_commit(root, head_rev or "HEAD")
    if not descends(root, base_rev, head_rev or "HEAD"):
        what, cause = f"{root} is not at the base, nor on top of it", "Another version of verl is checked out."
        next_ = f"git -C {quoted(root)} worktree add DIR {base_rev}   (make the edits there)"
        raise CheckoutStateError("take-wrong-commit", what, cause, next_)

    def original(path: str) -> bytes:
        return run_git(root, "cat-file", "blob", base[path][1])

    if head_rev is not None:
        return _compare(root, base, head, original, lambda path: run_git(root, "cat-file", "blob", head[path][1]))
    tracked = set(_names(root, "--cached")) | base.keys()
    others = set(_names(root, "--others", "--exclude-standard"))
    ignored = set(_names(root, "--others", "--ignored", "--exclude-standard", "--", "verl"))
    # Our own new files are taken even where git is told to ignore them.
    wanted = {path for path in others if path.startswith(PREFIX)} | {p for p in ignored if p.startswith(PACKAGE)}
    wanted = {path for path in wanted if not _is_cache(path)}
    current = _read_all(root, (path for path in sorted(tracked | wanted) if os.path.lexists(root / path)), base)
    left_out = sorted(path for path in (others | ignored) - wanted if not _is_cache(path))
    found = _compare(root, base, current, original, lambda path: (root / path).read_bytes())
    return Edits(found.contents, found.base_contents, tuple(left_out))


def _compare(
    root: Path, base: Listing, current: Listing, original: Callable[[str], bytes], content: Callable[[str], bytes]
) -> Edits:
    contents, originals = {}, {}
    for path in sorted(path for path in base.keys() | current.keys() if base.get(path) != current.get(path)):
        undo = f"git -C {quoted(root)} checkout -- {quoted(path)}"
        if not path.startswith(PREFIX):
            what, cause = f"{path} was changed, which lies outside verl/", "The patch carries verl's package only."
            next_ = f"Undo it there, or keep it in a branch of its own: {undo}"
            raise CheckoutStateError("take-outside", what, cause, next_, path=path)
        if path not in current:
            what, cause = f"{path} was deleted in the checkout", "Our patches never delete verl's files."
            raise CheckoutStateError("take-deleted", what, cause, undo, path=path)
        expected, found = base.get(path, ("100644", ""))[0], current[path][0]
        if found == "120000":
            raise not_plain(path, "a symbolic link")
        if found != expected:
            raise wrong_mode(path, expected[-3:], found[-3:])
        contents[path] = content(path)
        if path in base:
            originals[path] = original(path)
    return Edits(contents, originals)


def _read_all(root: Path, paths: Iterable[str], base: Listing | None = None) -> Listing:
    """Reads files' modes and ids; a link's content is where it points, a submodule of verl's is not looked into."""
    listing = {}
    for path in paths:
        if base and base.get(path, ("", ""))[0] == "160000":
            listing[path] = base[path]
            continue
        mode = (root / path).lstat().st_mode
        if stat.S_ISLNK(mode):
            listing[path] = ("120000", blob_id(os.fsencode(os.readlink(root / path))))
        elif stat.S_ISREG(mode):
            listing[path] = ("100755" if mode & 0o100 else "100644", blob_id((root / path).read_bytes()))
        else:
            raise not_plain(path, "no plain file")
    return listing


def _list_commit(root: Path, rev: str) -> Listing:
    commit = resolve_commit(root, rev)
    if not commit:
        what, cause = f"{root} has no commit {rev}", "A shallow clone, or a clone of another repository."
        next_ = f"git -C {quoted(root)} fetch origin {quoted(rev)}"
        raise CheckoutStateError("take-no-commit", what, cause, next_)
    listing = {}
    for entry in run_git(root, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
        info, path = entry.decode("utf-8").split("\t", 1)
        mode, _, blob = info.split(" ")
        listing[path] = (mode, blob)
    return listing


def resolve_commit(root: Path, rev: str) -> str:
    """Returns the full id of a commit of the clone at ``root``; an empty text if there is none."""
    options = ("--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    return run_git(root, "rev-parse", *options, allowed=(0, 1, 128)).decode().strip()


def descends(root: Path, base_rev: str, head_rev: str) -> bool:
    """True if the commit ``head_rev`` is ``base_rev`` or lies on top of it."""
    base, head = resolve_commit(root, base_rev), resolve_commit(root, head_rev)
    return bool(base and head) and run_git(root, "merge-base", base, head, allowed=(0, 1)).decode().strip() == base


def _names(root: Path, *arguments: str) -> list[str]:
    output = run_git(root, "ls-files", "-z", *arguments)
    return [name for name in output.decode("utf-8", "surrogateescape").split("\0") if name]


def _is_cache(path: str) -> bool:
    parts = path.split("/")
    return path.endswith((".pyc", ".pyo")) or any(part == "__pycache__" or part.startswith(".") for part in parts)
