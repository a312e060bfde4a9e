# SPDX-License-Identifier: Apache-2.0
"""Says what a target is, and reads its files. Git is not run, no link is followed."""

import errno
import os
import re
import stat
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .language import VERSION_FILE, blob_id
from .refusal import STATE, USAGE, Refusal, program, quoted

SEAM = "verl/utils/gradloc_seam.py"
"""The one file that our patch adds; it names the version that it was made for."""
MAX_FILE_BYTES = 16 * 2**20
_MARKS = ("verl/__init__.py", VERSION_FILE)
_UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "index.lock")
_INSTALLED_NAMES = ("site-packages", "dist-packages")
_KINDS = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))


@dataclass(frozen=True)
class Checkout:
    """Names a target: its root (with ``verl/`` in it) and what verl says it is."""

    root: Path
    version: str

    @property
    def state_folder(self) -> Path:
        """The folder of the journal and of what was applied."""
        return self.root / ".gradloc-patch"

    @property
    def kind(self) -> str:
        """What the target is, in words."""
        is_installed = self.root.name in _INSTALLED_NAMES
        return "clone" if (self.root / ".git").exists() else "package" if is_installed else "archive"

    @property
    def command(self) -> str:
        """How this tool is run on the target again."""
        return f"{program()} {'--installed' if self.kind == 'package' else f'--repo {quoted(self.root)}'}"

    def unfinished(self) -> str | None:
        """Return git's mark of an operation that is under way in the checkout, if any."""
        named = re.fullmatch(r"gitdir: (.+)", read_text(self.root / ".git"))
        folder = self.root / (named[1] if named else ".git")
        return next((name for name in _UNFINISHED if (folder / name).exists()), None)


def resolve(target: str, allow_installed: bool = False, command: str = "") -> Checkout:
    """Return the checkout at ``target``; refuse what is not the root of a verl tree, with the ``command`` to use."""
    command = command or program()
    if not target:
        raise Refusal(USAGE, "target-empty", "the target is an empty string", "A variable was unset.", command)
    try:
        root = Path(target).resolve()
        os.listdir(root)
    except (OSError, RuntimeError) as error:  # the latter for a link to itself, before Python 3.13
        what, cause = f"{target} is no folder that can be read", "It is misspelt, an archive, or another user's."
        raise Refusal(STATE, "target-unreadable", what, cause, f"{command} --repo VERL", found=str(error)) from error
    if lacking := [mark for mark in _MARKS if not (root / mark).is_file()]:
        cause, next_ = "Another folder was named.", "Name the folder that has verl/__init__.py in it."
        if all((root.parent / mark).is_file() for mark in _MARKS):
            cause, next_ = "Its parent was meant.", f"{command} --repo {quoted(root.parent)}"
        what = f"NOT_VERL: {target} is not the top of a verl tree"
        raise Refusal(STATE, "target-not-verl", what, cause, next_, found=f"no {lacking[0]}", state="NOT_VERL")
    if root.name in _INSTALLED_NAMES and not allow_installed:
        what, cause = f"{target} is an environment's package folder", "Every program of that environment is affected."
        next_ = f"{command} --installed   (with the Python of that environment)"
        raise Refusal(STATE, "target-installed", what, cause, next_)
    return Checkout(root, read_text(root / VERSION_FILE)[:40] or "unknown")


def installed_root() -> Path:
    """Return the folder that holds the verl package of the running Python."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:  # None: a mere folder of that name
        what, cause = "NOT_VERL: this Python has no verl", "It is not the Python that trains."
        raise Refusal(STATE, "target-not-installed", what, cause, "ENVIRONMENT/bin/python apply_patch.py --installed")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def read_text(path: Path) -> str:
    """Return the text of a small plain file without the white space around it; empty where there is none."""
    try:
        return read_regular(path, 2**20).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a plain file of at most ``limit`` bytes; OSError for a link, a pipe, a larger one."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            raise OSError(errno.EINVAL, f"not a plain file of at most {limit} bytes", str(path))
        return stream.read()


@dataclass(frozen=True)
class FileState:
    """Holds a file's content, None where there is no file, or a sentence of what is in the way."""

    content: bytes | None
    obstacle: str | None = None

    @property
    def blob(self) -> str | None:
        """Git's id of the content."""
        return None if self.content is None else blob_id(self.content)


def read_plain(root: Path, path: str) -> FileState:
    """Read the plain file ``path``."""
    place = root
    try:
        for part in Path(path).parts:
            place /= part
            if not stat.S_ISDIR(mode := place.lstat().st_mode) and place != root / path:
                break
        else:
            return FileState(read_regular(place))
    except FileNotFoundError:
        return FileState(None)
    except OSError as error:
        if isinstance(error, PermissionError):
            return FileState(None, "it may not be read")
    kind = next((name for test, name in _KINDS if test(mode)), "something")
    is_parent = place != root / path
    return FileState(None, f"{place.relative_to(root)} is {kind}, no folder" if is_parent else f"{kind} is in the way")
