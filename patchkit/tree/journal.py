# SPDX-License-Identifier: Apache-2.0
"""The journal of a transaction: what is about to change, written before anything does."""

import contextlib
import json
import os
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


@dataclass(frozen=True)
class Entry:
    """One file: in the ``tree`` or the ``state`` folder, its sha256 before and after (None: absent).

    ``temporary`` is the name, in the file's own folder, that holds the new content until it is moved in.
    """

    where: str
    path: str
    before: str | None
    after: str | None
    temporary: str


@dataclass(frozen=True)
class Journal:
    """A transaction; until it is ``committing`` no file has been touched. It makes ``folders``, outermost first."""

    committing: bool
    entries: tuple[Entry, ...]
    folders: tuple[str, ...]


def write(files: Filesystem, state: Path, journal: Journal) -> None:
    """Puts ``journal`` in place, durably, whole or not at all."""
    new = state / (JOURNAL_NAME + ".new")
    files.remove(new)
    files.write_new(new, json.dumps({"schema_version": 1} | asdict(journal), indent=1).encode())
    files.do(os.replace, new, state / JOURNAL_NAME)
    files.sync_folder(state)


def read(state: Path) -> Journal | None:
    """Returns the journal that an interrupted run left, or None; RollbackError if no run of ours has written it."""
    path = state / JOURNAL_NAME
    try:
        document = json.loads(read_regular(path, _MAX_BYTES))
        entries = tuple(Entry(**entry) for entry in document["entries"])
        for place in (*document["folders"], *(entry.path for entry in entries if entry.where == "tree")):
            check_path(place)  # a journal may come with an unpacked archive: trust no path in it
        known = document["schema_version"] == 1 and type(document["committing"]) is bool
        if not known or not all(map(_is_plausible, entries)):
            raise ValueError("not ours")
        return Journal(document["committing"], entries, tuple(document["folders"]))
    except FileNotFoundError:
        return None
    except _NOT_A_JOURNAL as error:
        raise broken(path) from error


def broken(path: Path) -> RollbackError:
    """Returns the refusal of a journal at ``path`` that cannot be used."""
    what, cause = (
        f"the journal {path} of an interrupted run cannot be used",
        "It, or what it names, was edited or damaged.",
    )
    next_ = f"--status names each file's state; restore what it names, then: rm -r {quoted(path.parent)}"
    return RollbackError("journal-broken", what, cause, next_)


def _is_plausible(entry: Entry) -> bool:
    digests = all(digest is None or re.fullmatch("[0-9a-f]{64}", digest) for digest in (entry.before, entry.after))
    is_ours = entry.where == "tree" or (entry.where == "state" and entry.path in STATE_FILES)
    return digests and is_ours and bool(re.fullmatch(r"\.gradloc\.\d+\.\d+\.tmp", entry.temporary))


def sweep(files: Filesystem, state: Path) -> None:
    """Removes what a finished transaction may have left beside its journal."""
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(state.iterdir()):
            if path.name.startswith((ORIGINAL, JOURNAL_NAME + ".new")):
                files.remove(path)
