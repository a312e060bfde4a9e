# SPDX-License-Identifier: Apache-2.0
"""Read a target and replace its files atomically, also if the process is killed. Runs no git, follows no link.

The state folder gets ``run``, made whole: the files to be in ``then``, those that they replace in ``now``, a journal of
their digests. Then each file is moved in. While ``run`` is there, the next run moves the old ones back. What is applied
is kept as ``applied``: the patch, and the files before it.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .patch import VERSION_FILE, blob_id, is_safe, parse, read_regular, sha256_hex
from .refusal import Refusal, disk_failed, program, quoted

SEAM = "verl/utils/gradloc_seam.py"  # the one file that our patch adds
STATE_FOLDER = ".gradloc-patch"
_MARKS = ("verl/__init__.py", VERSION_FILE)
_UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "index.lock")
_KINDS = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"))
Files = Mapping[str, bytes | None]  # contents by path; None means that there is no file
Changes = Mapping[str, tuple[bytes | None, bytes | None]]  # contents now and then


@dataclass(frozen=True)
class Checkout:
    """A target: its root, which contains ``verl/``, and verl's version."""

    root: Path
    version: str

    @property
    def kind(self) -> str:
        is_installed = self.root.name in ("site-packages", "dist-packages")
        return "clone" if (self.root / ".git").exists() else "package" if is_installed else "archive"

    @property
    def command(self) -> str:
        """Command that runs this tool on the target again."""
        return f"{program()} {'--installed' if self.kind == 'package' else f'--repo {quoted(self.root)}'}"

    def unfinished(self) -> str | None:
        """Return git's marker of an unfinished operation in the checkout, if any."""
        named = re.fullmatch(r"gitdir: (.+)", read_text(self.root / ".git"))
        folder = self.root / (named[1] if named else ".git")
        return next((name for name in _UNFINISHED if (folder / name).exists()), None)


def resolve(target: str, allow_installed: bool = False, command: str = "") -> Checkout:
    """Return the checkout at ``target``; refuse what is not the root of a verl tree, with the ``command`` to use."""
    about, root = {"target": target, "command": command or program()}, Path(target)
    if not target:
        raise Refusal("target-empty", **about)
    try:
        os.listdir(root := root.resolve())
    except (OSError, RuntimeError) as error:  # the latter for a link to itself, before Python 3.13
        raise Refusal("target-unreadable", **about, found=str(error)) from error
    if lacking := [mark for mark in _MARKS if not (root / mark).is_file()]:
        instead = root.parent if all((root.parent / mark).is_file() for mark in _MARKS) else "FOLDER"
        raise Refusal("target-not-verl", **about, instead=instead, state="NOT_VERL", found=f"no {lacking[0]}")
    checkout = Checkout(root, read_text(root / VERSION_FILE)[:40] or "unknown")
    if checkout.kind == "package" and not allow_installed:
        raise Refusal("target-installed", **about)
    return checkout


def installed_root() -> Path:
    """Return the folder that holds the verl package of the running Python."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:  # None: a mere folder of that name
        raise Refusal("target-not-installed")
    return Path(next(iter(spec.submodule_search_locations))).resolve().parent


def read_text(path: Path) -> str:
    """Return the text of a small plain file without the white space around it; empty where there is none."""
    try:
        return read_regular(path, 2**20).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class FileState:
    """A file's content, None if there is no file, or a sentence on what is in its place."""

    content: bytes | None
    obstacle: str | None = None

    @property
    def blob(self) -> str | None:
        return None if self.content is None else blob_id(self.content)


def read_plain(root: Path, path: str) -> FileState:
    """Read the plain file ``path``, and follow no link on the way to it."""
    whole, place = root / path, root
    try:
        for part in Path(path).parts:
            place /= part
            mode = place.lstat().st_mode
            if place == whole:
                return FileState(read_regular(place))
            if not stat.S_ISDIR(mode):
                break
    except FileNotFoundError:
        return FileState(None)
    except PermissionError:
        return FileState(None, "it may not be read")
    except OSError:
        pass  # no plain file
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something")
    if place == whole:
        return FileState(None, f"{kind} is in the way")
    return FileState(None, f"{place.relative_to(root)} is {kind}, no folder")


def do(call: Callable[..., Any], *arguments: Any) -> Any:
    """Change the disk by ``call``: every change goes through here, so that a test can make any one of them fail."""
    return call(*arguments)


@contextlib.contextmanager
def locked(root: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the tree's lock, which is on verl's version file; wait that long for another run."""
    place, ends = root / VERSION_FILE, time.monotonic() + wait_s
    with open(place, "r+b" if os.access(place, os.W_OK) else "rb") as handle:  # NFS locks what is open for writing
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    raise Refusal("no-locks", root=root, found=error.strerror) from error
                if time.monotonic() >= ends:
                    raise Refusal("locked", root=root) from error
                time.sleep(0.05)
        yield


def preflight(root: Path, changes: Changes) -> None:
    """Refuse what would stop ``changes`` from being written: a folder, a file, the disk."""
    needed = 2**20 + 2 * sum(len(data or b"") for sides in changes.values() for data in sides)
    if changes and (room := os.statvfs(root).f_bavail * os.statvfs(root).f_frsize) < needed:
        raise Refusal("disk-too-small", root=root, expected=f"{needed} bytes", found=f"{room} bytes")
    for folder in {root, *((root / path).parent for path in changes)} if changes else ():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal("blocked-folder", place=folder)
    for place in (root / STATE_FOLDER / name for name in ("", "new", "run", "applied", "done")):
        if os.path.lexists(place) and not stat.S_ISDIR(place.lstat().st_mode):
            raise Refusal("blocked-state", place=place)
    for path, (now, _) in changes.items():  # a replacement would succeed, and undo what its owner meant by it
        if now is not None and not (root / path).stat().st_mode & 0o200:
            raise Refusal("blocked-file", place=root / path)


def remembered(root: Path) -> tuple[bytes, dict[str, bytes | None]]:
    """Return the patch that the state folder remembers, and the files before it, as far as they are known."""
    folder, before = root / STATE_FOLDER / "applied", dict[str, bytes | None]()
    with contextlib.suppress(OSError, Refusal):
        for path, file in parse(patch := read_regular(folder / "patch")).items():
            if file.before is None or (folder / "now" / path).exists():
                before[path] = None if file.before is None else read_regular(folder / "now" / path)
                file.forward(before[path])
        return patch, before
    return b"", {}


def swap(root: Path, changes: Changes, patch: bytes | None) -> None:
    """Make ``changes`` and remember that ``patch`` is on now, or none; or raise with everything as it was."""
    digests, state = {path: [_digest(data) for data in sides] for path, sides in changes.items()}, root / STATE_FOLDER
    try:
        staged = {f"{side}/{path}": both[i] for path, both in changes.items() for i, side in enumerate(("now", "then"))}
        stage(root, "run", staged | {"journal.json": json.dumps(digests, indent=1).encode(), "patch": patch})
        for path, (now, then) in digests.items():
            _check(root, path, now)  # once more, just before
            _move(root, "then", path, then is None)
        for path, (_, then) in digests.items():
            _check(root, path, then)
        if patch is not None:
            do(shutil.rmtree, state / "applied", True)
        do(os.rename, state / "run", state / ("done" if patch is None else "applied"))
    except BaseException as error:  # an interrupt from the keyboard too
        recover(root, False, f"{error}; then ")
        raise disk_failed(error) if isinstance(error, OSError) else error from None
    _tidy(root, patch is not None)


def interrupted(root: Path, is_strict: bool = True) -> dict[str, tuple[bytes | None, str | None]]:
    """Return what an interrupted run changed: each file's content before it, and the digest after.

    A file that was edited since is refused, or left out where ``is_strict`` is off.
    """
    found, folder, path = dict[str, tuple[bytes | None, str | None]](), root / STATE_FOLDER / "run", "it"
    try:
        for path, (now, then) in json.loads(read_regular(folder / "journal.json", 2**20)).items():
            there, saved = (read_plain(place, path).content for place in (root, folder / "now"))
            if is_strict or _digest(there) in (now, then):
                found[path] = (there if _digest(there) == now else saved), then
                if not is_safe(path) or _digest(there) not in (now, then) or _digest(found[path][0]) != now:
                    raise ValueError("another content")  # the folder may have come with an unpacked archive
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise Refusal("journal-broken", path=path, run=folder, found=str(error)) from error
    return found


def recover(root: Path, is_strict: bool = True, cause: str = "") -> bool:
    """Put back what an interrupted run has changed, if one was."""
    entries, run = interrupted(root, is_strict), root / STATE_FOLDER / "run"
    try:
        for path, (now, then) in entries.items():
            if then != _digest(now) and then == _digest(read_plain(root, path).content):
                _move(root, "now", path, now is None)
        if was_begun := run.exists():
            do(os.rename, run, run.with_name("done"))
    except OSError as error:
        raise Refusal("disk-failed-again", run=run, found=f"{cause}{error}") from error
    if (root / STATE_FOLDER).exists():
        _tidy(root)
    return was_begun


def _move(root: Path, side: str, path: str, is_gone: bool) -> None:
    place = root / path
    do(os.unlink, place) if is_gone else do(os.replace, root / STATE_FOLDER / "run" / side / path, place)
    _sync(place.parent)


def _tidy(root: Path, is_applied: bool = True) -> None:
    """Remove what a run has left, and the state folder itself where nothing is applied."""
    state = root / STATE_FOLDER
    is_applied = is_applied and (state / "applied").exists()
    for place in [state / "done", state / "new"] if is_applied else [state]:
        with contextlib.suppress(OSError):  # the changes are made: the next run removes what cannot be removed now
            do(shutil.rmtree, place, True)


def stage(root: Path, name: str, files: Files) -> None:
    """Write a folder of the state folder durably, whole or not at all: each file as the one that it is for is."""
    state = root / STATE_FOLDER
    for place in (state / "new", state / "done"):
        do(shutil.rmtree, place, True)
    ignore = {} if (state / ".gitignore").exists() else {"../.gitignore": b"*\n"}
    for path, data in (ignore | {path: data for path, data in files.items() if data is not None}).items():
        place, its_own = state / "new" / path, root / path.partition("/")[2]
        like = its_own if path[0] in "nt" and its_own.is_file() else root / "verl/__init__.py"
        do(os.makedirs, place.parent, 0o777, True)
        with do(open, place, "xb") as stream:
            do(stream.write, data)
            stream.flush()
            shutil.copystat(like, place)
            os.utime(place)
            _give(place, like)
            do(os.fsync, stream.fileno())
    for folder in (state, *(place for place in state.rglob("*") if place.is_dir())):
        folder.chmod(stat.S_IMODE(root.stat().st_mode) | 0o700)  # no umask: others have to read it, too
        _give(folder, root)
        _sync(folder)
    do(shutil.rmtree, state / name, True)
    do(os.rename, state / "new", state / name)
    _sync(state)


def _give(place: Path, like: Path) -> None:
    if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
        os.chown(place, like.stat().st_uid, like.stat().st_gid)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # some file systems sync no folder
        os.fsync(handle)
    os.close(handle)


def _check(root: Path, path: str, digest: str | None) -> None:
    if (there := read_plain(root, path)).obstacle or _digest(there.content) != digest:
        raise Refusal("changed-meanwhile", path=path)


def _digest(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)
