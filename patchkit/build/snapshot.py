# SPDX-License-Identifier: Apache-2.0
"""What a checkout holds against its base, file by file, from bytes on disk and never from git's
index: an index can call a changed file clean (``assume-unchanged``) and does not know new files.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckoutStateError, IntegrityError
from ..patch.digest import blob_id
from ..patch.paths import PREFIX
from .git import run_git

OWN_FOLDER = "verl/gradloc/"
"""New files are taken from here even where git is told to ignore them."""
_PLAIN_MODES = ("100644", "100755")


@dataclass(frozen=True)
class Edits:
    """What a checkout changed: the new content of each file, and what was left aside."""

    contents: dict[str, bytes]
    base_contents: dict[str, bytes]
    """The base's content of each edited file that the base has."""
    left_out: tuple[str, ...] = field(default=())
    """Untracked files that are ignored by git or lie outside verl/."""


def edits_of_archive(root: Path, base: Path) -> Edits:
    """Returns the edits of a tree without git (an unpacked archive, an installed package)."""
    found = {path: root / path for path in _walk(root / "verl", PREFIX)}
    contents, base_contents = {}, {}
    for path in _walk(base / "verl", PREFIX):
        if path == "verl/version/version":  # a clone, an archive and a wheel each say their own
            found.pop(path, None)
            continue
        if path not in found:
            raise CheckoutStateError("take-deleted", path=path)
        mode, content = _read(found.pop(path), path)
        original = (base / path).read_bytes()
        if content != original:
            contents[path], base_contents[path] = content, original
            _check_mode(path, "100644", mode)
    for path, place in found.items():
        mode, contents[path] = _read(place, path)
        _check_mode(path, "100644", mode)
    return Edits(contents, base_contents)


def edits_of_clone(root: Path, base_rev: str, head_rev: str | None) -> Edits:
    """Returns the edits of a clone since ``base_rev``.

    Args:
        root: the work tree.
        base_rev: the commit that the patch is for.
        head_rev: a commit to take the edits from; None takes the work tree, with what is
            committed, staged, changed and new in it.
    """
    base = _list_commit(root, base_rev)
    _check_descends(root, base_rev, head_rev or "HEAD")
    if head_rev is not None:
        current = _list_commit(root, head_rev)
        return _compare(root, base, current, {p: b for p, (_, b) in current.items()}, ())
    tracked = set(_names(root, "--cached")) | base.keys()
    others = set(_names(root, "--others", "--exclude-standard"))
    ignored = set(_names(root, "--others", "--ignored", "--exclude-standard", "--", "verl"))
    ignored = {path for path in ignored if not _is_cache(path)}
    wanted = {path for path in others | ignored if path.startswith(OWN_FOLDER)}
    wanted |= {path for path in others if path.startswith(PREFIX)}
    wanted = {path for path in wanted if not _is_cache(path)}
    current, contents = {}, {}
    for path in sorted(tracked | wanted):
        if (root / path).is_symlink() or (root / path).exists():
            expected = base.get(path, ("100644", ""))[0]
            if expected == "160000":  # a submodule of verl's: not a file to compare
                current[path] = base[path]
                continue
            mode, content = _read(root / path, path, expected)
            current[path] = (mode, blob_id(content))
            contents[path] = content
    return _compare(root, base, current, contents, tuple(sorted((others | ignored) - wanted)))


def _compare(
    root: Path,
    base: dict[str, tuple[str, str]],
    current: dict[str, tuple[str, str]],
    contents: dict[str, bytes] | dict[str, str],
    left_out: tuple[str, ...],
) -> Edits:
    edited, originals = {}, {}
    for path in sorted(base.keys() | current.keys()):
        if base.get(path) == current.get(path):
            continue
        if not path.startswith(PREFIX):
            raise CheckoutStateError("take-outside", path=path, target=root)
        if path not in current:
            raise CheckoutStateError("take-deleted", path=path, target=root)
        _check_mode(path, base.get(path, ("100644", ""))[0], current[path][0])
        content = contents[path]
        edited[path] = content if isinstance(content, bytes) else _blob(root, content)
        if path in base:
            originals[path] = _blob(root, base[path][1])
    return Edits(edited, originals, left_out)


def _check_mode(path: str, expected: str, found: str) -> None:
    if found == "120000":
        raise IntegrityError("build-symlink", path=path)
    if found != expected:
        raise IntegrityError("build-mode", path=path, expected=expected[-3:], found=found[-3:])


def _read(place: Path, path: str, expected: str = "100644") -> tuple[str, bytes]:
    """Returns a file's git mode and content; a link's content is where it points."""
    mode = place.lstat().st_mode
    if stat.S_ISLNK(mode):
        return "120000", os.fsencode(os.readlink(place))
    if not stat.S_ISREG(mode):
        raise IntegrityError("build-not-a-file", path=path)
    return ("100755" if mode & 0o100 else "100644"), place.read_bytes()


def _list_commit(root: Path, rev: str) -> dict[str, tuple[str, str]]:
    """Returns the mode and blob id of every path of a commit."""
    commit = resolve_commit(root, rev)
    listing = {}
    for entry in run_git(root, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
        info, path = entry.decode("utf-8").split("\t", 1)
        mode, _, blob = info.split(" ")
        listing[path] = (mode, blob)
    return listing


def resolve_commit(root: Path, rev: str) -> str:
    """Returns the full id of a commit of the clone at ``root``."""
    spec = f"{rev}^{{commit}}"
    found = (
        run_git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", spec, allowed=(0, 1, 128))
        .decode()
        .strip()
    )
    if not found:
        raise CheckoutStateError("take-no-commit", rev=rev, target=root)
    return found


def _check_descends(root: Path, base_rev: str, head_rev: str) -> None:
    base, head = resolve_commit(root, base_rev), resolve_commit(root, head_rev)
    shared = run_git(root, "merge-base", base, head, allowed=(0, 1)).decode().strip()
    if shared != base:
        raise CheckoutStateError(
            "take-wrong-commit",
            target=root,
            expected=f"{base[:12]} or a commit on top of it",
            found=head[:12],
            commit=base[:12],
        )


def _names(root: Path, *arguments: str) -> list[str]:
    output = run_git(root, "ls-files", "-z", *arguments)
    return [name for name in output.decode("utf-8", "surrogateescape").split("\0") if name]


def _blob(root: Path, blob: str) -> bytes:
    return run_git(root, "cat-file", "blob", blob)


def _walk(folder: Path, prefix: str) -> Iterator[str]:
    for place in sorted(folder.rglob("*")):
        path = prefix + place.relative_to(folder).as_posix()
        if (place.is_symlink() or not place.is_dir()) and not _is_cache(path):
            yield path


def _is_cache(path: str) -> bool:
    parts = path.split("/")
    return path.endswith((".pyc", ".pyo")) or any(part == "__pycache__" or part.startswith(".") for part in parts)
