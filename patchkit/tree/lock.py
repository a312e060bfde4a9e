# SPDX-License-Identifier: Apache-2.0
"""One run at a time per checkout. The kernel holds the lock, so a dead run never leaves one."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CheckoutStateError, LockedError, quoted
from .filesystem import Filesystem

LOCK_NAME, IGNORE_NAME = "lock", ".gitignore"
_PATIENCE_S, _POLL_S = 1.0, 0.05
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def locked(files: Filesystem, folder: Path, hide: bool, wait_s: float = 0.0) -> Iterator[None]:
    """Holds the lock of the state folder ``folder``, which it makes and, if unused, removes.

    Waits ``wait_s`` seconds for a run that holds it. With ``hide`` it writes a ``.gitignore`` into the folder, for a
    target that lies in another repository.

    Raises:
        LockedError: if another run holds the lock.
        CheckoutStateError: if something else stands where the folder or the lock should be.
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
    what, cause = (
        f"another run is at work in this checkout ({folder})",
        "Two were started; the lock goes with a run's end.",
    )
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
