# SPDX-License-Identifier: Apache-2.0
"""The one class through which the applier changes a disk, and the lock: one run at a time per checkout."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckoutStateError, LockedError, quoted

LOCK_NAME, IGNORE_NAME = "lock", ".gitignore"
_PATIENCE_S, _POLL_S = 1.0, 0.05
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Filesystem:
    """Every change that the applier makes is one call of ``do``, so that a test can make any one of them fail."""

    def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``call(*arguments)``, one system call."""
        return call(*arguments)

    def make_folder(self, path: Path) -> None:
        self.do(os.mkdir, path)
        parent = path.parent.stat()
        if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
            os.chown(path, parent.st_uid, parent.st_gid)
        self.do(os.chmod, path, stat.S_IMODE(parent.st_mode))  # no umask: others have to read it, too

    def remove(self, path: Path) -> None:
        """Removes a file, if it is there."""
        if os.path.lexists(path):
            self.do(os.unlink, path)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.do(os.fsync, handle)
        finally:
            os.close(handle)

    def write_new(self, path: Path, data: bytes, like: Path | None = None) -> None:
        """Writes a new file, where nothing may be, not even a link, and makes it durable.

        It has permissions, access lists and, where root runs this, the owner of ``like``; else the folder's owner.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        owner, handle = (like or path.parent).stat(), self.do(os.open, path, flags, 0o666)
        try:
            if like is not None:
                self.do(os.fchmod, handle, stat.S_IMODE(owner.st_mode) & 0o777)
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


def check_folders(root: Path, path: Path) -> None:
    """Raises CheckoutStateError if a folder between ``root`` and ``path`` is a link or a file."""
    place = root
    for part in path.relative_to(root).parts[:-1]:
        place = place / part
        if os.path.lexists(place) and not stat.S_ISDIR(place.lstat().st_mode):
            cause = "A link or a file stands where the patch needs a folder; links are never followed."
            raise CheckoutStateError("blocked-folder", f"{place} is not a folder", cause, "Move it away.")


@contextlib.contextmanager
def locked(files: Filesystem, folder: Path, hide: bool, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the lock of the state folder ``folder``, which it makes and, if unused, removes.

    Waits ``wait_s`` seconds for another run, then raises LockedError. With ``hide`` the folder gets a ``.gitignore``:
    the target may lie in another repository.
    """
    try:
        handle = _acquire(files, folder, time.monotonic() + wait_s)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise no_permission(folder.parent) from error
        raise
    try:
        if hide and not os.path.lexists(folder / IGNORE_NAME):
            files.write_new(folder / IGNORE_NAME, b"*\n")
        yield
    finally:
        try:
            _leave_no_trace(files, folder)
        finally:
            os.close(handle)


def _leave_no_trace(files: Filesystem, folder: Path) -> None:
    with contextlib.suppress(OSError):  # what cannot be removed does no harm
        is_used = {entry.name for entry in folder.iterdir()} - {LOCK_NAME, IGNORE_NAME}
        for name in (LOCK_NAME,) if is_used else (IGNORE_NAME, LOCK_NAME):
            files.remove(folder / name)
        if not is_used:
            files.do(os.rmdir, folder)


def no_permission(folder: Path) -> CheckoutStateError:
    """Returns the refusal for a folder that may not be written to."""
    what, cause = f"the folder {folder} may not be written to", "It belongs to another user, or is mounted read-only."
    return CheckoutStateError("blocked-permission", what, cause, f"Run as its owner: ls -ld {quoted(folder)}")


def held(folder: Path, found: str) -> LockedError:
    """Returns the refusal for a checkout in which another run is at work."""
    what, cause = f"another run is at work in this checkout ({folder})", "Its lock goes when it ends, however it ends."
    return LockedError("locked", what, cause, "Run this again when it has ended, or with --wait SECONDS.", found=found)


def _acquire(files: Filesystem, folder: Path, ends: float) -> int:
    patience, found = time.monotonic() + _PATIENCE_S, ""
    while not found or time.monotonic() < ends:
        time.sleep(_POLL_S if found else 0)
        # Gone at once is possible too: a run that just ended removes the folder if it is empty.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            files.make_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            check_kind(folder, stat.S_ISDIR, "folder")
            if os.path.lexists(folder / LOCK_NAME):
                check_kind(folder / LOCK_NAME, stat.S_ISREG, "plain file")
            handle = files.do(os.open, folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder may have removed the file between our open and our lock.
                if (folder / LOCK_NAME).stat().st_ino == os.fstat(handle).st_ino:
                    os.ftruncate(handle, 0)
                    since = time.strftime("%Y-%m-%d %H:%M:%S")
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
                    return handle
            except BlockingIOError:
                found = _holder(handle) or "a run that just began"
            os.close(handle)
        if not found and time.monotonic() > patience:
            found = "runs that come and go"
    raise held(folder, found)


def check_kind(path: Path, test: Callable[[int], bool], kind: str) -> None:
    """Raises CheckoutStateError unless what stands at ``path`` is of a kind."""
    if not test(path.lstat().st_mode):
        cause = "Something else stands where this tool keeps its lock and journal."
        raise CheckoutStateError("blocked-state-folder", f"{path} is not a {kind}", cause, "Move it away.")


def _holder(handle: int) -> str:
    return os.pread(handle, 200, 0).decode("utf-8", "replace").strip()


def holder(folder: Path) -> str | None:
    """Returns who holds the lock of ``folder``, or None; changes nothing and waits for nothing."""
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(handle)
    finally:
        os.close(handle)
    return None
