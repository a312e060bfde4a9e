# SPDX-License-Identifier: Apache-2.0
"""The one class through which the applier changes a disk."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckoutStateError


class Filesystem:
    """Every change that the applier makes is one call of ``do``.

    So a test can make any one of them fail, or end the process there, and look at what is left.
    """

    def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``call(*arguments)``, one system call."""
        return call(*arguments)

    def make_folder(self, path: Path) -> None:
        self.do(os.mkdir, path)
        if os.geteuid() == 0:  # what root makes in a user's checkout is the user's
            parent = path.parent.stat()
            os.chown(path, parent.st_uid, parent.st_gid)

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

    def write_new(self, path: Path, data: bytes, like: os.stat_result | None = None) -> None:
        """Writes a new file, where nothing may be, not even a link, and makes it durable.

        It takes over the permissions of ``like``; where root runs this its owner is that of ``like``, else of the folder.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = self.do(os.open, path, flags, 0o666)
        try:
            if like is not None:
                self.do(os.fchmod, handle, stat.S_IMODE(like.st_mode) & 0o777)
            owner = like or path.parent.stat()
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
