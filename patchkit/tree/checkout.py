# SPDX-License-Identifier: Apache-2.0
"""Finds out what a target is: a clone, a linked worktree, a submodule, an archive, a package.

Everything is read from files; git is not run, so a checkout's own configuration can start nothing
and a checkout of another owner works.
"""

import os
import re
import stat
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import CheckoutStateError, UsageError

STATE_FOLDER = ".gradloc-patch"
VERSION_FILE = "verl/version/version"
_MARKS = ("verl/__init__.py", VERSION_FILE, "verl/workers/actor/dp_actor.py")
_UNFINISHED = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or git am",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "index.lock": "another git command",
}
_INSTALLED_NAMES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Checkout:
    """A target: its root (with ``verl/`` in it) and, where it has one, its git folder."""

    root: Path
    git_dir: Path | None
    head: str | None
    """The commit that is checked out; None where that is unknown."""
    version: str
    """What ``verl/version/version`` says."""

    @property
    def state_folder(self) -> Path:
        """Where the lock, the journal and the record of what was applied live."""
        return (self.git_dir or self.root) / STATE_FOLDER

    @property
    def kind(self) -> str:
        """What the target is, in words."""
        if self.git_dir is None:
            return "installed package" if self.root.name in _INSTALLED_NAMES else "unpacked archive"
        return "clone" if self.git_dir == self.root / ".git" else "linked worktree or submodule"

    def unfinished(self) -> str | None:
        """Returns which operation of git is under way in the checkout, if any."""
        for name, label in _UNFINISHED.items():
            if self.git_dir and (self.git_dir / name).exists():
                return label
        return None


def resolve(target: str, allow_installed: bool = False) -> Checkout:
    """Returns the checkout at ``target``.

    Raises:
        UsageError: for an empty target.
        CheckoutStateError: if it is not the root of a verl tree; the reason says what it is.
    """
    if not target:
        raise UsageError("target-empty")
    root = Path(target)
    try:
        mode = root.stat().st_mode
        root = root.resolve()
        if stat.S_ISDIR(mode):
            os.listdir(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckoutStateError("target-missing", target=target) from error
    except OSError as error:
        raise CheckoutStateError("target-unreadable", target=target, found=error.strerror) from error
    if not stat.S_ISDIR(mode):
        raise CheckoutStateError("target-not-a-folder", target=target)
    _refuse_what_is_not_verl(root, target)
    if root.name in _INSTALLED_NAMES and not allow_installed:
        raise CheckoutStateError("target-installed", target=target)
    git_dir = _git_dir(root)
    version = (root / VERSION_FILE).read_text("utf-8", "replace").strip()[:40]
    return Checkout(root, git_dir, _head(git_dir) if git_dir else None, version)


def _refuse_what_is_not_verl(root: Path, target: str) -> None:
    lacking = [mark for mark in _MARKS if not (root / mark).is_file()]
    if not lacking:
        return
    if all((root.parent / mark).is_file() for mark in _MARKS):
        raise CheckoutStateError("target-inside", target=target, parent=root.parent)
    if (root / "HEAD").is_file() and (root / "objects").is_dir():
        raise CheckoutStateError("target-bare", target=target)
    raise CheckoutStateError("target-not-verl", target=target, found=f"no {lacking[0]}")


def installed_root() -> Path:
    """Returns the folder that holds the verl package of the running Python.

    Raises:
        CheckoutStateError: if this Python has no verl.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise CheckoutStateError("target-not-installed")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def _git_dir(root: Path) -> Path | None:
    """The git folder of a work tree whose top is ``root``; folders above are not asked."""
    entry = root / ".git"
    if entry.is_dir():
        return entry
    if not entry.is_file():
        return None
    match = re.match(r"gitdir: (.+)\Z", entry.read_text("utf-8", "replace").rstrip("\n"))
    if not match:
        return None
    folder = (root / match[1]).resolve()
    return folder if folder.is_dir() else None


def _head(git_dir: Path) -> str | None:
    """The commit that HEAD names, from loose or packed refs; None where it cannot be read."""
    try:
        head = (git_dir / "HEAD").read_text("ascii").strip()
        if not head.startswith("ref: "):
            return head if re.match(r"[0-9a-f]{40}\Z", head) else None
        ref = head.removeprefix("ref: ")
        folders = [git_dir]
        if (git_dir / "commondir").is_file():
            folders.append((git_dir / (git_dir / "commondir").read_text().strip()).resolve())
        for folder in folders:
            if (folder / ref).is_file():
                return (folder / ref).read_text("ascii").strip()
        for folder in folders:
            if (folder / "packed-refs").is_file():
                for line in (folder / "packed-refs").read_text("utf-8", "replace").splitlines():
                    if line.endswith(f" {ref}"):
                        return line.split(" ")[0]
    except (OSError, UnicodeDecodeError):
        return None
    return None
