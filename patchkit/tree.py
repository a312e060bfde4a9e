# SPDX-License-Identifier: Apache-2.0
"""What a target is (a clone, a linked worktree, an archive, an installed package), and what its files hold.

Everything is read from files; git is not run, so a checkout's own configuration can start nothing and a checkout of
another owner works. No link is followed, and only content decides which state a tree is in.
"""

import errno
import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from .language import FilePatch, blob_id
from .refusal import STATE, USAGE, Refusal, program, quoted

STATE_FOLDER = ".gradloc-patch"
VERSION_FILE = "verl/version/version"
SEAM = "verl/utils/gradloc_seam.py"
"""The one file that the patch adds; it names the version that it was made for."""
MAX_FILE_BYTES = 16 * 2**20
_MARKS = ("verl/__init__.py", VERSION_FILE)
_UNFINISHED = {"rebase-merge": "a rebase", "rebase-apply": "a rebase or git am", "MERGE_HEAD": "a merge"}
_UNFINISHED |= {"CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert", "index.lock": "another git command"}
_INSTALLED_NAMES = ("site-packages", "dist-packages")
_KINDS = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))


@dataclass(frozen=True)
class Checkout:
    """A target: its root (with ``verl/`` in it), its git folder where it has one, and what verl says it is."""

    root: Path
    git_dir: Path | None
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
    def option(self) -> str:
        """How the target is named to the applier."""
        return "--installed" if self.kind == "installed package" else f"--repo {quoted(self.root)}"

    @property
    def command(self) -> str:
        """How this applier is run on the target again."""
        return f"{program()} {self.option}"

    def unfinished(self) -> str | None:
        """Which operation of git is under way in the checkout, if any."""
        found = (label for name, label in _UNFINISHED.items() if self.git_dir and (self.git_dir / name).exists())
        return next(found, None)


def resolve(target: str, allow_installed: bool = False, command: str = "") -> Checkout:
    """The checkout at ``target``; what is not the root of a verl tree is refused, and named, to ``command``."""
    command = command or program()
    if not target:
        raise Refusal(USAGE, "target-empty", "the target is an empty string", "A variable was unset.", command)
    try:
        root = Path(target).resolve()
        os.listdir(root)
    except (OSError, RuntimeError) as error:  # the latter for a link to itself, before Python 3.13
        what, cause = f"{target} is no folder that can be read", "It is misspelt, an archive, or another user's."
        found = getattr(error, "strerror", "a link to itself")
        next_ = f"{command} --repo VERL"
        raise Refusal(STATE, "target-unreadable", what, cause, next_, found=found) from error
    lacking = [mark for mark in _MARKS if not (root / mark).is_file()]
    if lacking:
        cause, next_ = "Another folder was named.", "Name the folder that has verl/__init__.py in it."
        if all((root.parent / mark).is_file() for mark in _MARKS):
            cause, next_ = "Its parent was meant.", f"{command} --repo {quoted(root.parent)}"
        what = f"NOT_VERL: {target} is not the top of a verl tree"
        raise Refusal(STATE, "target-not-verl", what, cause, next_, found=f"no {lacking[0]}", state="NOT_VERL")
    if root.name in _INSTALLED_NAMES and not allow_installed:
        what, cause = f"{target} is an environment's package folder", "Every program of that environment is affected."
        next_ = f"{command} --installed   (with the Python of that environment)"
        raise Refusal(STATE, "target-installed", what, cause, next_)
    return Checkout(root, _git_dir(root), _read(root / VERSION_FILE)[:40] or "unknown")


def installed_root() -> Path:
    """The folder that holds the verl package of the running Python."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:  # None: a mere folder of that name
        what, cause = "NOT_VERL: this Python has no verl", "It is not the Python that trains."
        raise Refusal(STATE, "target-not-installed", what, cause, "ENVIRONMENT/bin/python apply_patch.py --installed")
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


def _read(path: Path) -> str:
    """The text of a small plain file without the white space around it; empty where there is no such file."""
    try:
        return read_regular(path, 2**20).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a plain file of at most ``limit`` bytes; OSError for a link, a pipe, and what is larger."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise OSError(errno.EINVAL, f"not a plain file of at most {limit} bytes", str(path))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(handle)


@dataclass(frozen=True)
class FileState:
    """What stands at a path: its content and its blob id, or a sentence of what is in the way."""

    content: bytes | None
    obstacle: str | None = None

    @cached_property
    def blob(self) -> str | None:
        return None if self.content is None else blob_id(self.content)


def read_plain(root: Path, path: str) -> FileState:
    """The content of the plain file ``path``, None if nothing is there, or the obstacle."""
    try:
        for parent in reversed([*Path(path).parents][:-1]):
            mode = (root / parent).lstat().st_mode
            if not stat.S_ISDIR(mode):
                return FileState(None, f"{parent} is {_kind(mode)}, not a folder")
        return FileState(read_regular(root / path))
    except FileNotFoundError:
        return FileState(None)
    except PermissionError:
        return FileState(None, "it may not be read")
    except OSError as error:
        return FileState(
            None, f"{_kind((root / path).lstat().st_mode, error.strerror or 'what is there')} is in the way"
        )


def _kind(mode: int, otherwise: str = "a plain file") -> str:
    return next((name for test, name in _KINDS if test(mode)), otherwise)


@dataclass(frozen=True)
class Edition:
    """What the patch does to the verl of a tag."""

    base: str
    version: str
    files: dict[str, FilePatch]
    patch: bytes


@dataclass(frozen=True)
class Survey:
    """A checkout measured against an edition; ``strangers`` are paths whose content is neither side's."""

    checkout: Checkout
    edition: Edition
    files: dict[str, FileState]

    @cached_property
    def strangers(self) -> list[str]:
        return [path for path in self.files if not self.holds(path, False) and not self.holds(path, True)]

    @property
    def state(self) -> str:
        """``PRISTINE``, ``APPLIED``, ``PARTIAL`` (a mix), ``DRIFTED`` (strangers), ``WRONG_BASE`` (of another verl),
        or ``OTHER_VERSION``, of the patch."""
        if self.other_version:
            return "OTHER_VERSION"
        if self.strangers:
            return "DRIFTED" if self.is_base else "WRONG_BASE"
        is_patched = [self.holds(path, True) for path in self.files]
        return "APPLIED" if all(is_patched) else "PARTIAL" if any(is_patched) else "PRISTINE"

    @cached_property
    def other_version(self) -> str | None:
        """The version of the patch that is on, if it is another one: 0.1 to 0.3 had a package of their own in verl."""
        older = _read(self.checkout.root / "verl/gradloc/__init__.py")
        seam = _read(self.checkout.root / SEAM)
        found = re.search(r'^(?:__version__|VERSION) = "([0-9A-Za-z.+-]{1,40})"', older or seam, re.MULTILINE)
        if older:
            return found[1] if found else "0.1.0"
        return found[1] if found and self.strangers and found[1] != self.edition.version else None

    @property
    def is_base(self) -> bool:
        """Whether verl says that it is the edition's."""
        return self.checkout.version.removesuffix(".dev") == self.edition.base.removeprefix("v")

    def holds(self, path: str, patched: bool) -> bool:
        """Whether what is at ``path`` is what the patch makes of it, or the base's."""
        file, found = self.edition.files[path], self.files[path]
        return found.obstacle is None and found.blob == (file.after if patched else file.before)


def survey(checkout: Checkout, editions: list[Edition]) -> Survey:
    """What the checkout holds, measured against the edition that fits it best."""
    seen: dict[str, FileState] = {}
    for path in (path for edition in editions for path in edition.files):
        seen.setdefault(path, read_plain(checkout.root, path))
    surveys = [Survey(checkout, e, {path: seen[path] for path in e.files}) for e in editions]
    return min(surveys, key=lambda one: (bool(one.strangers), not one.is_base, len(one.strangers)))
