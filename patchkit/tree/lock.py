# SPDX-License-Identifier: Apache-2.0
"""One run at a time per checkout. The kernel holds the lock, so a dead run never leaves one."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckoutStateError, LockedError
from .filesystem import Filesystem

LOCK_NAME = "lock"
IGNORE_NAME = ".gitignore"
_ATTEMPTS = 50
_HOLDER_BYTES = 200


@contextlib.contextmanager
def locked(files: Filesystem, folder: Path, hide: bool) -> Iterator[None]:
    """Holds the lock of the state folder ``folder``, which it makes and, if unused, removes.

    Args:
        files: through which the disk is changed.
        folder: the state folder.
        hide: write a ``.gitignore`` into it, for a target that lies in another repository.

    Raises:
        LockedError: if another run holds the lock.
        CheckoutStateError: if something else stands where the folder should be.
    """
    try:
        handle = _acquire(files, folder)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise CheckoutStateError("blocked-permission", path=folder.parent, target=folder.parent) from error
        raise
    try:
        if hide and not (folder / IGNORE_NAME).exists():
            files.write_new(folder / IGNORE_NAME, b"*\n")
        yield
    finally:
        _release(files, folder, handle)


def _acquire(files: Filesystem, folder: Path) -> int:
    for _ in range(_ATTEMPTS):
        # Gone at once is possible too: a run that just ended removes the folder if it is empty.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            files.make_folder(folder)
        try:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise CheckoutStateError("blocked-state-folder", path=folder)
            handle = files.open_lock(folder / LOCK_NAME)
        except FileNotFoundError:  # a run that just ended removed the folder
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, _HOLDER_BYTES, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            raise LockedError("locked", path=folder, found=holder or "a run that just began") from (error)
        # The holder may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if (folder / LOCK_NAME).stat().st_ino == os.fstat(handle).st_ino:
                os.ftruncate(handle, 0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                note = f"process {os.getpid()} on {socket.gethostname()} since {started}\n"
                os.pwrite(handle, note.encode(), 0)
                return handle
        os.close(handle)
    raise LockedError("locked", path=folder, found="runs that come and go")


def _release(files: Filesystem, folder: Path, handle: int) -> None:
    """Leaves no trace where none is needed; what cannot be removed does no harm."""
    try:
        with contextlib.suppress(OSError):
            rest = {entry.name for entry in folder.iterdir()} - {LOCK_NAME, IGNORE_NAME}
            if not rest:
                files.remove_if_there(folder / IGNORE_NAME)
            files.remove(folder / LOCK_NAME)
            if not rest:
                files.remove_folder(folder)
    finally:
        os.close(handle)


def holder(folder: Path) -> str | None:
    """Returns who holds the lock of ``folder``, or None; changes nothing."""
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(handle, _HOLDER_BYTES, 0).decode("utf-8", "replace").strip()
    finally:
        os.close(handle)
    return None
