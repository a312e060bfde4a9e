# SPDX-License-Identifier: Apache-2.0
"""Predicts the write phase: what would stop it is found before anything is written."""

import os
from pathlib import Path

from ..errors import TransactionError, quoted
from .filesystem import check_folders
from .lock import no_permission
from .transaction import Change

SPARE_BYTES = 2**20
"""Room for folders, the journal and the file system's own needs."""


def preflight(root: Path, state: Path, changes: list[Change]) -> None:
    """Raises what would stop ``changes`` from being written under ``root``.

    Raises:
        CheckoutStateError: a folder is a link or a file, or may not be written to.
        TransactionError: the disk has not enough room.
    """
    if not changes:
        return
    holder = state if state.is_dir() else state.parent
    folders = {holder}
    for change in changes:
        check_folders(root, root / change.path)
        folder = (root / change.path).parent
        while not os.path.lexists(folder):
            folder = folder.parent
        folders.add(folder)
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise no_permission(folder)
    saved = sum(len(change.before or b"") for change in changes)
    written = sum(len(change.after or b"") for change in changes)
    for folder, needed in ((root, saved + written), (holder, saved)):
        room = os.statvfs(folder)
        free, needed = room.f_bavail * room.f_frsize, needed + SPARE_BYTES
        if free < needed:
            what = f"the disk of {folder} has not enough room; nothing was written"
            sizes = {"expected": f"{needed} bytes", "found": f"{free} bytes"}
            raise TransactionError("disk-too-small", what, "It is full.", f"Make room: df -h {quoted(folder)}", **sizes)
