# SPDX-License-Identifier: Apache-2.0
"""Finds out what a target is: a clone, a linked worktree, a submodule, an archive, a package.

Everything is read from files; git is not run, so a checkout's own configuration can start nothing and a checkout of
another owner works. What such a file says is checked before it is followed: a git folder elsewhere must point back.
"""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import CheckoutStateError, UsageError, program, quoted
from ..patch.content import read_regular

STATE_FOLDER = ".gradloc-patch"
VERSION_FILE = "verl/version/version"
_MARKS = ("verl/__init__.py", VERSION_FILE)
_UNFINISHED = {"rebase-merge": "a rebase", "rebase-apply": "a rebase or git am", "MERGE_HEAD": "a merge"}
_UNFINISHED |= {"CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert", "index.lock": "another git command"}
_INSTALLED_NAMES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Checkout:
    """A target: its root (with ``verl/`` in it) and, where it has one, its git folder.

    ``head`` is the commit that is checked out, None where that is unknown; ``version`` what verl says of itself.
    """

    root: Path
    git_dir: Path | None
    head: str | None
    version: str

    @property
    def state_folder(self) -> Path:
        """Where the lock, the journal and the copy of what was applied live."""
        return (self.git_dir or self.root) / STATE_FOLDER

    @property
    def kind(self) -> str:
        """What the target is, in words."""
        if self.git_dir is None:
            return "installed package" if self.root.name in _INSTALLED_NAMES else "unpacked archive"
        return "clone" if self.git_dir == self.root / ".git" else "linked worktree or submodule"

    @property
    def command(self) -> str:
        """How the applier is run on this target again."""
        return f"{program()} " + ("--installed" if self.kind == "installed package" else f"--repo {quoted(self.root)}")

    def unfinished(self) -> str | None:
        """Returns which operation of git is under way in the checkout, if any."""
        found = (label for name, label in _UNFINISHED.items() if self.git_dir and (self.git_dir / name).exists())
        return next(found, None)


def resolve(target: str, allow_installed: bool = False) -> Checkout:
    """Returns the checkout at ``target``, or refuses what is not the root of a verl tree and says what it is."""
    again = f"{program()} --repo VERL"
    if not target:
        raise UsageError("target-empty", "the target is an empty string", "A shell variable was unset.", again)
    root = Path(target)
    try:
        if root.is_file():
            cause = "An archive was named, not the folder it unpacks to."
            raise CheckoutStateError("target-not-a-folder", f"{target} is a file", cause, "Unpack it.")
        root = root.resolve()
        os.listdir(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        cause = "It is misspelt, or relative to another folder."
        raise CheckoutStateError("target-missing", f"there is no folder {target}", cause, again) from error
    except OSError as error:
        what, cause = f"the folder {target} cannot be read", "It belongs to another user."
        raise CheckoutStateError("target-unreadable", what, cause, "Run as its owner.", found=error.strerror) from error
    _refuse_what_is_not_verl(root, target)
    if root.name in _INSTALLED_NAMES and not allow_installed:
        what, cause = f"{target} is an environment's package folder", "Every program of that environment is affected."
        next_ = f"{program()} --installed   (with the Python of that environment)"
        raise CheckoutStateError("target-installed", what, cause, next_)
    git_dir = _git_dir(root)
    return Checkout(root, git_dir, _head(git_dir) if git_dir else None, _read(root / VERSION_FILE)[:40] or "unknown")


def _refuse_what_is_not_verl(root: Path, target: str) -> None:
    lacking = [mark for mark in _MARKS if not (root / mark).is_file()]
    if not lacking:
        return
    reason, what, cause = "target-not-verl", "is not the top of a verl tree", "Another folder was named."
    next_ = "Name the folder that has verl/__init__.py in it."
    if all((root.parent / mark).is_file() for mark in _MARKS):
        reason, what, cause = "target-inside", "lies inside a verl tree", "Its parent was meant."
        next_ = f"{program()} --repo {quoted(root.parent)}"
    elif (root / "HEAD").is_file() and (root / "objects").is_dir():
        reason, what, cause = "target-bare", "is a bare repository or a .git folder", "It has no files to patch."
        next_ = f"git clone {quoted(target)} VERL"
    raise CheckoutStateError(reason, f"NOT_VERL: {target} {what}", cause, next_, found=f"no {lacking[0]}")


def installed_root() -> Path:
    """Returns the folder that holds the verl package of the running Python."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        what, cause = "NOT_VERL: this Python has no verl", "It is not the Python that trains."
        next_ = "ENVIRONMENT/bin/python apply_patch.py --installed"
        raise CheckoutStateError("target-not-installed", what, cause, next_)
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def _git_dir(root: Path) -> Path | None:
    """The git folder of a work tree whose top is ``root``.

    A ``.git`` file may name any folder, to be written to: it must point back, by ``gitdir`` or ``core.worktree``.
    """
    entry = root / ".git"
    if entry.is_dir() and not entry.is_symlink():
        return entry
    named = re.fullmatch(r"gitdir: (.+)", _read(entry))
    if not named:
        return None
    folder = (root / named[1]).resolve()
    back = (folder / (_read(folder / "gitdir") or "?")).resolve() == entry
    worktree = re.search(r"^\s*worktree = (.+)$", _read(folder / "config"), re.MULTILINE)
    return folder if back or (worktree and (folder / worktree[1]).resolve() == root) else None


def _head(git_dir: Path) -> str | None:
    """The commit that HEAD names, from loose or packed refs; None where it cannot be read or is no commit."""
    ref = _read(git_dir / "HEAD")
    if ref.startswith("ref: "):
        name = ref.removeprefix("ref: ")
        common = (git_dir / (_read(git_dir / "commondir") or ".")).resolve()
        if not re.fullmatch(r"refs/[^\s\\]+", name) or ".." in name.split("/"):
            return None
        packed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(name)}$", _read(common / "packed-refs"), re.MULTILINE)
        ref = _read(git_dir / name) or _read(common / name) or (packed[1] if packed else "")
    return ref if re.fullmatch("[0-9a-f]{40}", ref) else None


def _read(path: Path) -> str:
    """The text of a small plain file without the white space around it; empty where there is no such file."""
    try:
        return read_regular(path, 2**20).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""
