# SPDX-License-Identifier: Apache-2.0
"""Changes several files as one: all of them or none, whatever fails or is killed when; one run at a time.

New contents are written beside their targets and the old ones saved, both made durable; then a journal says what is
about to happen; then each file is moved in. While the journal is there, the next run puts the old contents back.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .language import check_path, sha256_hex
from .refusal import DISK, DISK_TWICE, LOCKED, STATE, Refusal, disk_failed, quoted
from .tree import read_plain, read_regular

JOURNAL, LOCK, APPLIED = "journal.json", "lock", "applied.patch"
"""In the state folder, beside a ``.gitignore``; the last is a copy of what was applied."""
_POLL_S, _FLAGS = 0.05, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Change:
    """One file's content before and after; None means that there is no file."""

    path: str
    before: bytes | None
    after: bytes | None


class Filesystem:
    """Every change of a disk is one call of ``do``, so that a test can make any one of them fail."""

    def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return call(*arguments)

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""
        if os.path.lexists(path):
            self.do(os.unlink, path)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.do(os.fsync, handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folder
                raise
        finally:
            os.close(handle)

    def write_new(self, path: Path, data: bytes, like: Path | None = None) -> None:
        """Writes a new file, where nothing may be, not even a link, and makes it durable; it has permissions, access
        lists and, where root runs this, the owner of ``like``, or of the folder."""
        owner = (like or path.parent).stat()
        handle = self.do(os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
        try:
            if like is not None:
                self.do(os.fchmod, handle, stat.S_IMODE(owner.st_mode) & 0o777)
                with contextlib.suppress(OSError):  # of a file system without any
                    for name in os.listxattr(like) if hasattr(os, "listxattr") else ():
                        with contextlib.suppress(OSError):
                            os.setxattr(handle, name, os.getxattr(like, name))
            if os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (0, 0):
                self.do(os.fchown, handle, owner.st_uid, owner.st_gid)
            view = memoryview(data)
            while view:
                view = view[self.do(os.write, handle, view) :]
            self.do(os.fsync, handle)
        finally:
            self.do(os.close, handle)

    def replace(self, path: Path, data: bytes) -> None:
        """Puts a file of our own in place, whole or not at all."""
        new = path.with_name(path.name + ".new")
        self.remove(new)
        self.write_new(new, data)
        self.do(os.replace, new, path)
        self.sync_folder(path.parent)


@contextlib.contextmanager
def locked(files: Filesystem, folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the lock of the state folder, which is made and, if unused, removed; waits that long for another run."""
    ends, handle = time.monotonic() + wait_s, None
    while handle is None:
        handle, found = _acquire(files, folder)
        if handle is None and time.monotonic() >= ends:
            what, cause = f"another run is at work in this checkout ({folder})", "Its lock goes when it ends."
            raise Refusal(LOCKED, "locked", what, cause, "Run this again, or with --wait SECONDS.", found=found)
        time.sleep(_POLL_S if handle is None else 0)
    try:
        if not os.path.lexists(folder / ".gitignore"):  # the target may lie in another repository
            files.write_new(folder / ".gitignore", b"*\n")
        yield
    finally:
        with contextlib.suppress(OSError):  # what cannot be removed does no harm
            is_used = {entry.name for entry in folder.iterdir()} - {LOCK, ".gitignore"}
            for name in (LOCK,) if is_used else (".gitignore", LOCK):
                files.remove(folder / name)
            if not is_used:
                files.do(os.rmdir, folder)
        os.close(handle)


def _acquire(files: Filesystem, folder: Path) -> tuple[int | None, str]:
    """The lock's handle, or None and who holds it. A run that just ended may remove lock and folder meanwhile."""
    try:
        if not os.path.lexists(folder):
            parent = folder.parent.stat()
            files.do(os.mkdir, folder)
            if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
                os.chown(folder, parent.st_uid, parent.st_gid)
            os.chmod(folder, stat.S_IMODE(parent.st_mode))  # no umask: others have to read it, too
        if not stat.S_ISDIR(folder.lstat().st_mode) or (folder / LOCK).is_symlink():
            what, cause = f"{folder} is not a folder of this tool", "Something else stands where its lock is kept."
            raise Refusal(STATE, "blocked-state-folder", what, cause, "Move it away.")
        handle = files.do(os.open, folder / LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
    except (FileExistsError, FileNotFoundError):
        return None, "runs that come and go"
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise no_permission(folder.parent) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / LOCK).stat().st_ino == os.fstat(handle).st_ino:
            os.ftruncate(handle, 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
            return handle, ""
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(handle)
        with contextlib.suppress(OSError):
            files.remove(folder / LOCK)
            os.rmdir(folder)
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        what, cause = f"the file system of {folder} has no locks", "It is a network's, mounted without them (nolock)."
        next_ = "Patch a copy on a local disk and put that in its place."
        raise Refusal(STATE, "no-locks", what, cause, next_, found=error.strerror) from error
    found = os.pread(handle, 200, 0).decode("utf-8", "replace").strip()
    os.close(handle)
    return None, found or "a run that just began"


def no_permission(place: Path) -> Refusal:
    what, cause = f"{place} may not be written to", "It belongs to another user, is read-only, or is missing."
    return Refusal(STATE, "blocked-permission", what, cause, f"Run as its owner, or see: ls -ld {quoted(place)}")


def preflight(root: Path, state: Path, changes: list[Change]) -> None:
    """Refuses what would stop ``changes`` from being written: a folder, a file, the disk."""
    needed = sum(len(change.before or b"") + len(change.after or b"") for change in changes) + 2**20
    holder = state if state.is_dir() else state.parent
    for folder in {holder, *((root / change.path).parent for change in changes)} if changes else ():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise no_permission(folder)
        room = os.statvfs(folder)
        if room.f_bavail * room.f_frsize < needed:
            what = f"the disk of {folder} has not enough room; nothing was written"
            sizes = {"expected": f"{needed} bytes", "found": f"{room.f_bavail * room.f_frsize} bytes"}
            raise Refusal(DISK, "disk-too-small", what, "It is full.", f"Make room: df -h {quoted(folder)}", **sizes)
    for change in changes:  # a replacement would succeed, and undo what its owner meant by it
        if change.before is not None and not (root / change.path).stat().st_mode & 0o200:
            what, cause = f"{root / change.path} is read-only", "Its owner wants it kept, or a tool checked it out so."
            raise Refusal(STATE, "blocked-permission", what, cause, f"chmod u+w {quoted(root / change.path)}")


class Transaction:
    """Changes of the tree ``root``, journalled in ``state``; the caller holds the lock."""

    def __init__(self, files: Filesystem, root: Path, state: Path) -> None:
        self.files, self.root, self.state = files, root, state

    def run(self, changes: list[Change], applied: bytes | None) -> None:
        """Makes ``changes`` and keeps a copy of what is ``applied`` now, or raises with everything as it was."""
        entries = [{"path": c.path, "before": _digest(c.before), "after": _digest(c.after)} for c in changes]
        try:
            self._prepare(changes)
            self.files.replace(self.state / JOURNAL, json.dumps(entries, indent=1).encode())
            for change, entry in zip(changes, entries, strict=True):
                self._move_in(change.path, entry)
            for folder in {(self.root / change.path).parent for change in changes}:
                self.files.sync_folder(folder)
            for entry in entries:
                if not self._is(entry, "after"):
                    raise _changed(str(entry["path"]))
            if applied is None:
                self.files.remove(self.state / APPLIED)
            else:
                self.files.replace(self.state / APPLIED, applied)
            self.files.remove(self.state / JOURNAL)
        except BaseException as error:  # an interrupt from the keyboard too
            self._undo(entries, f"{error}; then ")
            if isinstance(error, OSError):
                raise disk_failed(str(error.filename or "a file").removeprefix(f"{self.root}/"), error) from error
            raise
        with contextlib.suppress(OSError):  # the changes stand: the next run sweeps what is left
            self._sweep(entries)

    def interrupted(self) -> dict[str, bytes | None]:
        """What the next run puts back first, by path, if one was interrupted."""
        return {e["path"]: None if e["before"] is None else self._before(e) for e in self._journal() or ()}

    def recover(self, paths: Iterable[str]) -> bool:
        """Puts back what an interrupted run has changed, if one was; touches nothing if a file was edited since. What
        it left beside ``paths`` goes in any case."""
        entries = self._journal()
        if entries is not None:
            self._undo(entries)
            return True
        with contextlib.suppress(OSError):
            self._sweep([{"path": path} for path in paths])
        return False

    def _journal(self) -> list[dict[str, Any]] | None:
        try:
            entries = json.loads(read_regular(self.state / JOURNAL, 2**20))
            for entry in entries:  # it may have come with an unpacked archive: trust nothing in it
                check_path(entry["path"])
                if any(
                    value and not re.fullmatch("[0-9a-f]{64}", value) for value in (entry["before"], entry["after"])
                ):
                    raise ValueError("not ours")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Refusal, OSError) as error:
            raise self._broken() from error
        for entry in entries:
            if not (self._is(entry, "before") or self._is(entry, "after")):
                what = f"{entry['path']} was edited after a run was interrupted there"
                cause = f"The rest is undone only where contents are known; those of before lie in {self.state}."
                next_ = (
                    f"Move your edit of {quoted(self.root / entry['path'])} elsewhere, restore verl's, run this again."
                )
                raise Refusal(STATE, "journal-conflict", what, cause, next_)
        return entries

    def _broken(self) -> Refusal:
        what, cause = f"the journal {self.state / JOURNAL} of an interrupted run cannot be used", "It is damaged."
        next_ = f"--status names each file's state; restore what it names, then: rm -r {quoted(self.state)}"
        return Refusal(DISK_TWICE, "journal-broken", what, cause, next_)

    def _prepare(self, changes: list[Change]) -> None:
        for change in changes:
            if change.before is not None:
                self.files.remove(self._saved(change.path))
                self.files.write_new(self._saved(change.path), change.before)
            if change.after is not None:
                self.files.remove(self._temporary(change.path))
                self.files.write_new(self._temporary(change.path), change.after, self._like(self.root / change.path))

    def _move_in(self, path: str, entry: dict[str, Any]) -> None:
        """Replaces a file, which is looked at once more just before."""
        if not self._is(entry, "before"):
            raise _changed(path)
        if entry["after"] is None:
            self.files.do(os.unlink, self.root / path)
        else:
            self.files.do(os.replace, self._temporary(path), self.root / path)

    def _undo(self, entries: list[dict[str, Any]], cause: str = "") -> None:
        try:
            for entry in entries:
                if not self._is(entry, "before") and self._is(entry, "after"):
                    self._restore(entry)
            self.files.remove(self.state / JOURNAL)
            self._sweep(entries)
        except OSError as error:
            what = f"the disk failed, and so did putting things back; the journal is {self.state / JOURNAL}"
            next_ = "Repair it, then run this again: what was begun is undone first."
            because, found = "The disk is full, read-only or damaged.", f"{cause}{error.strerror}"
            raise Refusal(DISK_TWICE, "disk-failed-again", what, because, next_, found=found) from error

    def _restore(self, entry: dict[str, Any]) -> None:
        place = self.root / entry["path"]
        if entry["before"] is None:
            self.files.do(os.unlink, place)
            return
        saved = self._before(entry)
        self.files.remove(self._temporary(entry["path"]))
        self.files.write_new(self._temporary(entry["path"]), saved, self._like(place))
        self.files.do(os.replace, self._temporary(entry["path"]), place)
        self.files.sync_folder(place.parent)

    def _sweep(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self.files.remove(self._temporary(entry["path"]))
        for path in self.state.iterdir() if self.state.is_dir() else ():
            if path.name.startswith("before-") or path.name.endswith(".new"):
                self.files.remove(path)

    def _before(self, entry: dict[str, Any]) -> bytes:
        place = self.root / entry["path"]
        data = (place if self._is(entry, "before") else self._saved(entry["path"])).read_bytes()
        if sha256_hex(data) != entry["before"]:
            raise self._broken()
        return data

    def _like(self, place: Path) -> Path:
        """Whose permissions the file gets: its own, or those of verl's first."""
        return place if place.exists() else self.root / "verl/__init__.py"

    def _saved(self, path: str) -> Path:
        return self.state / f"before-{path.replace('/', '-')}"

    def _temporary(self, path: str) -> Path:
        return (self.root / path).with_name(f".gradloc.{Path(path).name}.tmp")

    def _is(self, entry: dict[str, Any], side: str) -> bool:
        file = read_plain(self.root, entry["path"])
        return not file.obstacle and entry[side] == _digest(file.content)


def _changed(path: str) -> Refusal:
    what = f"{path} was changed while this ran; everything else was put back"
    next_ = "Look at it with --status, then run this again."
    return Refusal(STATE, "changed-meanwhile", what, "Another program wrote to it.", next_)


def _digest(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)
