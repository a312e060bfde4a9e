# SPDX-License-Identifier: Apache-2.0
"""The journal of a transaction: what is about to change, written before anything does."""

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import PatchkitError, RollbackError, quoted
from ..patch.content import read_regular
from ..patch.paths import check_path
from .filesystem import Filesystem

JOURNAL_NAME = "journal.json"
ORIGINAL = "original-"
STATE_FILES = ("applied.patch", "applied.json")
"""What a transaction may change in the state folder; 0.1.0 wrote the second."""
_MAX_BYTES = 2**20
_NOT_A_JOURNAL = (ValueError, KeyError, TypeError, AttributeError, RecursionError, PatchkitError, OSError)
_TEMPORARY = re.compile(r"\.gradloc\.\d+\.\d+\.tmp\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class Entry:
    """One file: where it is, its sha256 before and after (None: absent), the file to move in."""

    where: str
    """``tree`` or ``state``: which folder ``path`` is relative to."""
    path: str
    before: str | None
    after: str | None
    temporary: str
    """The name, in the file's own folder, that holds the new content until it is moved in."""


@dataclass(frozen=True)
class Journal:
    """A transaction. While ``committing`` is False, no file has been touched."""

    committing: bool
    entries: tuple[Entry, ...]
    folders: tuple[str, ...]
    """Folders of the tree that the transaction makes, outermost first."""


def write(files: Filesystem, state: Path, journal: Journal) -> None:
    """Puts ``journal`` in place, durably, whole or not at all."""
    new = state / (JOURNAL_NAME + ".new")
    files.remove_if_there(new)
    files.write_new(new, json.dumps({"schema_version": 1} | asdict(journal), indent=1).encode())
    files.replace(new, state / JOURNAL_NAME)
    files.sync_folder(state)


def read(state: Path) -> Journal | None:
    """Returns the journal that an interrupted run left, or None.

    Raises:
        RollbackError: if there is one that no run of this tool has written.
    """
    path = state / JOURNAL_NAME
    try:
        document = json.loads(read_regular(path, _MAX_BYTES))
        entries = tuple(Entry(**entry) for entry in document["entries"])
        for entry in entries:
            _check(entry)
        for folder in document["folders"]:
            check_path(folder)
        if document["schema_version"] != 1 or type(document["committing"]) is not bool:
            raise ValueError("another schema")
        return Journal(document["committing"], entries, tuple(document["folders"]))
    except FileNotFoundError:
        return None
    except _NOT_A_JOURNAL as error:
        raise broken(path) from error


def broken(path: Path) -> RollbackError:
    """Returns the refusal of a journal at ``path`` that cannot be used."""
    what = f"the journal {path} of an interrupted run cannot be used"
    next_ = f"--status names each file's state; restore what it names, then: rm -r {quoted(path.parent)}"
    return RollbackError("journal-broken", what, "It, or what it names, was edited or damaged.", next_)


def _check(entry: Entry) -> None:
    """A journal may come with an unpacked archive: trust no path in it."""
    if entry.where == "tree":
        check_path(entry.path)
    elif entry.where != "state" or entry.path not in STATE_FILES:
        raise ValueError(entry.where)
    if not _TEMPORARY.match(entry.temporary):
        raise ValueError(entry.temporary)
    for digest in (entry.before, entry.after):
        if digest is not None and not _SHA256.match(digest):
            raise ValueError(digest)


def sweep(files: Filesystem, state: Path) -> None:
    """Removes what a finished transaction may have left beside its journal."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(state.iterdir()):
            if path.name.startswith((ORIGINAL, JOURNAL_NAME + ".new")):
                files.remove(path)
