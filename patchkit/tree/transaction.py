# SPDX-License-Identifier: Apache-2.0
"""Changes several files as one: all of them or none, whatever fails or is killed when.

New contents are written beside their targets and the old ones saved, both made durable; then the journal says
"committing"; then each file is moved in. Until the journal is gone, the next run undoes the rest.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..command import disk_failed
from ..errors import CheckoutStateError, PatchkitError, RollbackError, TransactionError, quoted
from ..patch.content import check_path, read_regular, sha256_hex
from .disk import Filesystem, check_folders, no_permission
from .survey import read_plain

JOURNAL_NAME, ORIGINAL = "journal.json", "original-"
KEPT_PATCH = "applied.patch"  # a copy of what was applied, in the state folder
_NOT_A_JOURNAL = (ValueError, KeyError, TypeError, AttributeError, RecursionError, PatchkitError, OSError)
SPARE_BYTES = 2**20  # for folders, the journal and the file system's own needs


@dataclass(frozen=True)
class Change:
    """One file's content before and after; None means that there is no file."""

    path: str
    before: bytes | None
    after: bytes | None
    where: str = "tree"


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


def write_journal(files: Filesystem, state: Path, journal: Journal) -> None:
    """Puts ``journal`` in place, durably, whole or not at all."""
    new = state / (JOURNAL_NAME + ".new")
    files.remove(new)
    files.write_new(new, json.dumps({"schema_version": 1} | asdict(journal), indent=1).encode())
    files.do(os.replace, new, state / JOURNAL_NAME)
    files.sync_folder(state)


def read_journal(state: Path) -> Journal | None:
    """Returns the journal that an interrupted run left, or None; RollbackError if no run of ours has written it."""
    path = state / JOURNAL_NAME
    try:
        document = json.loads(read_regular(path, 2**20))
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
        raise _broken(path) from error


def _broken(path: Path) -> RollbackError:
    what, cause = f"the journal {path} of an interrupted run cannot be used", "It, or what it names, is damaged."
    next_ = f"--status names each file's state; restore what it names, then: rm -r {quoted(path.parent)}"
    return RollbackError("journal-broken", what, cause, next_)


def _is_plausible(entry: Entry) -> bool:
    digests = all(digest is None or re.fullmatch("[0-9a-f]{64}", digest) for digest in (entry.before, entry.after))
    is_ours = entry.where == "tree" or (entry.where == "state" and entry.path == KEPT_PATCH)
    return digests and is_ours and bool(re.fullmatch(r"\.gradloc\.\d+\.\d+\.tmp", entry.temporary))


def _sweep(files: Filesystem, state: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(state.iterdir()):
            if path.name.startswith((ORIGINAL, JOURNAL_NAME + ".new")):
                files.remove(path)


def preflight(root: Path, state: Path, changes: list[Change]) -> None:
    """Raises what would stop ``changes`` from being written: an odd folder, a lack of permission or of room."""
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


class Transaction:
    """Changes of the tree ``root``, journalled in ``state``; the caller holds the lock."""

    def __init__(self, files: Filesystem, root: Path, state: Path) -> None:
        self.files, self.root, self.state = files, root, state
        self.roots = {"tree": root, "state": state}

    def run(self, changes: list[Change]) -> None:
        """Makes ``changes``, or raises with everything as it was; RollbackError leaves the rest to the next run."""
        journal = self._plan(changes)
        try:
            write_journal(self.files, self.state, journal)
            self._prepare(journal, changes)
            journal = replace(journal, committing=True)
            write_journal(self.files, self.state, journal)
            self._move_in(journal)
            self.files.remove(self.state / JOURNAL_NAME)
        except BaseException as error:  # an interrupt from the keyboard too
            self._undo(journal, f"{error}; then ")
            if isinstance(error, OSError):
                raise disk_failed(str(error.filename or "a file").removeprefix(f"{self.root}/"), error) from error
            raise
        # From here on the changes stand: what cannot be tidied now is swept by the next run.
        with contextlib.suppress(OSError):
            self.files.sync_folder(self.state)
            _sweep(self.files, self.state)

    def recover(self) -> bool:
        """Undoes what an interrupted run left, if anything; touches nothing if a file was edited since."""
        journal = read_journal(self.state)
        for entry in journal.entries if journal and journal.committing else ():
            if not (self._is(entry, entry.before) or self._is(entry, entry.after)):
                what = f"{entry.path} was edited after a run was interrupted there"
                cause = f"The rest can be undone only where contents are known; those of before lie in {self.state}."
                next_ = f"Move your edit of {quoted(self._place(entry))} elsewhere, restore verl's, run this again."
                raise CheckoutStateError("journal-conflict", what, cause, next_, path=entry.path)
        self._undo(journal or Journal(False, (), ()))
        return journal is not None

    def drop_caches(self, paths: Iterable[str]) -> list[Path]:
        """Removes byte code and folders that removed modules leave; returns what may not be removed.

        A container that ran as another user leaves such files; they do no harm and are no part of the transaction.
        """
        left = set()
        for place in (self.root / path for path in paths):
            cache, folder = place.parent / "__pycache__", place.parent
            try:
                for cached in sorted(cache.glob(f"{place.stem}.*.pyc")):
                    self.files.remove(cached)
                self._drop_if_empty(cache)
                while folder not in (self.root, self.root / "verl") and self._drop_if_empty(folder):
                    folder = folder.parent
            except OSError:
                left.add(cache if cache.exists() else folder)
        return sorted(left)

    def _plan(self, changes: list[Change]) -> Journal:
        entries = []
        for number, change in enumerate(changes):
            before, after = (None if data is None else sha256_hex(data) for data in (change.before, change.after))
            temporary = f".gradloc.{os.getpid()}.{number}.tmp"
            entries.append(Entry(change.where, change.path, before, after, temporary))
        made = [change.path for change in changes if change.after is not None]
        parents = {p.as_posix() for path in made for p in Path(path).parents} - {"."}
        missing = sorted(path for path in parents if not os.path.lexists(self.root / path))
        return Journal(False, tuple(entries), tuple(missing))

    def _prepare(self, journal: Journal, changes: list[Change]) -> None:
        for folder in journal.folders:
            check_folders(self.root, self.root / folder)
            self.files.make_folder(self.root / folder)
        for number, (entry, change) in enumerate(zip(journal.entries, changes, strict=True)):
            place = self._place(entry)
            check_folders(self.roots[entry.where], place)
            if change.before is not None:
                self.files.write_new(self.state / f"{ORIGINAL}{number}", change.before)
            if change.after is not None:
                like = place if change.before is not None else self.root / "verl/__init__.py"
                self.files.write_new(place.with_name(entry.temporary), change.after, like)

    def _move_in(self, journal: Journal) -> None:
        """Replaces first, deletes last; each file is looked at once more just before."""
        for entry in sorted(journal.entries, key=lambda entry: entry.after is None):
            place = self._place(entry)
            if not self._is(entry, entry.before):
                what = f"{entry.path} was changed while this ran; everything else was put back"
                next_ = "Look at it with --status, then run this again."
                raise CheckoutStateError("changed-meanwhile", what, "Another program wrote to it.", next_)
            check_folders(self.roots[entry.where], place)
            if entry.after is None:
                self.files.do(os.unlink, place)
            else:
                self.files.do(os.replace, place.with_name(entry.temporary), place)
        for folder in {self._place(entry).parent for entry in journal.entries}:
            self.files.sync_folder(folder)
        for entry in journal.entries:
            if not self._is(entry, entry.after):
                raise OSError(0, "the disk does not hold what was written", entry.path)

    def _undo(self, journal: Journal, cause: str = "") -> None:
        """Puts every file that was replaced back, then removes every trace."""
        try:
            for number, entry in enumerate(journal.entries):
                if journal.committing and not self._is(entry, entry.before) and self._is(entry, entry.after):
                    self._restore(number, entry)
            for entry in journal.entries:
                self.files.remove(self._place(entry).with_name(entry.temporary))
            for folder in reversed(journal.folders):
                self._drop_if_empty(self.root / folder)
            self.files.remove(self.state / JOURNAL_NAME)
            _sweep(self.files, self.state)
        except OSError as error:
            what = f"the disk failed, and so did putting things back; the journal is {self.state / JOURNAL_NAME}"
            next_ = "Repair it, then run this again: what was begun is undone first."
            because, found = "The disk is full, read-only or damaged.", f"{cause}{error.strerror}"
            raise RollbackError("disk-failed-again", what, because, next_, found=found) from error

    def _restore(self, number: int, entry: Entry) -> None:
        place = self._place(entry)
        check_folders(self.roots[entry.where], place)
        if entry.before is None:
            self.files.do(os.unlink, place)
            return
        saved = (self.state / f"{ORIGINAL}{number}").read_bytes()
        if sha256_hex(saved) != entry.before:
            raise _broken(self.state / JOURNAL_NAME)
        temporary = place.with_name(entry.temporary)
        self.files.remove(temporary)
        self.files.write_new(temporary, saved, place if place.exists() else None)
        self.files.do(os.replace, temporary, place)
        self.files.sync_folder(place.parent)

    def _place(self, entry: Entry) -> Path:
        return self.roots[entry.where] / entry.path

    def _is(self, entry: Entry, digest: str | None) -> bool:
        file = read_plain(self.roots[entry.where], entry.path)
        return not file.obstacle and digest == (None if file.content is None else sha256_hex(file.content))

    def _drop_if_empty(self, folder: Path) -> bool:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            self.files.do(os.rmdir, folder)
            return True
        return not folder.exists()
