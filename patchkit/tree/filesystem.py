# SPDX-License-Identifier: Apache-2.0
"""The one class through which the applier changes a disk.

Each method is one system call or close to it, so that a test can make any one of them fail, or end the process there,
and look at what is left.
"""

import os
import stat
from pathlib import Path

from ..errors import CheckoutStateError


class Filesystem:
    """Plain operations on files; every change that the applier makes goes through here."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)
        if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
            parent = path.parent.stat()
            os.chown(path, parent.st_uid, parent.st_gid)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def create(self, path: Path, mode: int) -> int:
        """Opens a new file for writing; fails if anything, even a link, is there already."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return os.write(handle, data)

    def set_mode(self, handle: int, mode: int) -> None:
        os.fchmod(handle, mode)

    def set_owner(self, handle: int, uid: int, gid: int) -> None:
        os.fchown(handle, uid, gid)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    # What follows is made of the operations above.

    def write_new(self, path: Path, data: bytes, like: os.stat_result | None = None) -> None:
        """Writes a new file and makes it durable.

        Args:
            path: where; nothing may be there.
            data: the content.
            like: a file whose permissions the new one takes over. Its owner, where root runs this, is that of ``like``,
                else of the folder.
        """
        handle = self.create(path, 0o666)
        try:
            if like is not None:
                self.set_mode(handle, stat.S_IMODE(like.st_mode) & 0o777)
            owner = like or path.parent.stat()
            if os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (0, 0):
                self.set_owner(handle, owner.st_uid, owner.st_gid)
            view = memoryview(data)
            while view:
                view = view[self.write(handle, view) :]
            self.sync(handle)
        finally:
            self.close(handle)

    def remove_if_there(self, path: Path) -> None:
        if os.path.lexists(path):
            self.remove(path)


def check_folders(root: Path, path: Path) -> None:
    """Raises CheckoutStateError if a folder between ``root`` and ``path`` is a link or a file."""
    place = root
    for part in path.relative_to(root).parts[:-1]:
        place = place / part
        try:
            if not stat.S_ISDIR(place.lstat().st_mode):
                cause = "A link or a file stands where the patch needs a folder; links are never followed."
                raise CheckoutStateError("blocked-folder", f"{place} is not a folder", cause, "Move it away.")
        except FileNotFoundError:
            return
