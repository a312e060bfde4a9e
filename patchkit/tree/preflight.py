# SPDX-License-Identifier: Apache-2.0
"""Predicts the write phase: what would stop it is found before anything is written."""

import os
from pathlib import Path

from ..errors import CheckoutStateError, TransactionError
from .filesystem import check_folders
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
    if not os.access(state if state.is_dir() else state.parent, os.W_OK | os.X_OK):
        raise CheckoutStateError("blocked-permission", path=state.parent, target=root)
    for change in changes:
        check_folders(root, root / change.path)
        folder = (root / change.path).parent
        while not os.path.lexists(folder):
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckoutStateError("blocked-permission", path=folder, target=root)
    saved = sum(len(change.before or b"") for change in changes)
    written = sum(len(change.after or b"") for change in changes)
    holder = state if state.is_dir() else state.parent
    for folder, needed in ((root, saved + written), (holder, saved)):
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        if free < needed + SPARE_BYTES:
            raise TransactionError(
                "disk-too-small",
                path=folder,
                expected=f"{needed + SPARE_BYTES} bytes",
                found=f"{free} bytes",
            )
