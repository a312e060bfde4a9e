# SPDX-License-Identifier: Apache-2.0
"""Changes several files as one: all of them or none, whatever fails or is killed when.

New contents are written beside their targets and the old ones saved, both made durable; then the
journal says "committing"; then each file is moved in. Until the journal is gone, the next run can
finish or undo the rest from what is on the disk.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckoutStateError, RollbackError, TransactionError
from ..patch.digest import sha256_hex
from . import journal as journals
from .filesystem import Filesystem, check_folders
from .journal import JOURNAL_NAME, ORIGINAL, Entry, Journal
from .survey import read_plain


@dataclass(frozen=True)
class Change:
    """One file's content before and after; None means that there is no file."""

    path: str
    before: bytes | None
    after: bytes | None
    where: str = "tree"


class Transaction:
    """Changes of the tree ``root``, journalled in ``state``; the caller holds the lock."""

    def __init__(self, files: Filesystem, root: Path, state: Path) -> None:
        self.files = files
        self.roots = {"tree": root, "state": state}
        self.root = root
        self.state = state

    def run(self, changes: list[Change]) -> None:
        """Makes ``changes``.

        Raises:
            TransactionError: the disk failed; everything is as it was.
            CheckoutStateError: a file changed meanwhile; everything else is as it was.
            RollbackError: the disk failed twice; the journal stays for the next run.
        """
        journal = self._plan(changes)
        try:
            journals.write(self.files, self.state, journal)
            self._prepare(journal, changes)
            journal = Journal(True, journal.entries, journal.folders)
            journals.write(self.files, self.state, journal)
            self._move_in(journal)
            self.files.remove(self.state / JOURNAL_NAME)
        except OSError as error:
            self._undo(journal, error)
            raise TransactionError("disk-failed", path=_named(error, self.root), found=error.strerror) from error
        except BaseException as error:  # an interrupt from the keyboard too
            self._undo(journal, error)
            raise
        # From here on the changes stand: what cannot be tidied now is swept by the next run.
        with contextlib.suppress(OSError):
            self.files.sync_folder(self.state)
            journals.sweep(self.files, self.state)

    def recover(self) -> str | None:
        """Finishes or undoes what an interrupted run left; returns which, or None.

        Raises:
            CheckoutStateError: if a file was edited since; nothing is touched.
            RollbackError: if the disk fails again, or what is needed is gone.
        """
        journal = journals.read(self.state)
        try:
            if journal is None:
                journals.sweep(self.files, self.state)
                return None
            return self._resolve(journal)
        except OSError as error:
            raise RollbackError("disk-failed-again", path=self.state / JOURNAL_NAME, found=error.strerror) from error

    def pending(self) -> bool:
        """True if an interrupted run left a journal; changes nothing."""
        return os.path.lexists(self.state / JOURNAL_NAME)

    def _plan(self, changes: list[Change]) -> Journal:
        entries = tuple(
            Entry(
                change.where,
                change.path,
                _sha256(change.before),
                _sha256(change.after),
                f".gradloc.{os.getpid()}.{number}.tmp",
            )
            for number, change in enumerate(changes)
        )
        made = [change.path for change in changes if change.after is not None]
        parents = {p.as_posix() for path in made for p in Path(path).parents} - {"."}
        missing = sorted(path for path in parents if not os.path.lexists(self.root / path))
        return Journal(False, entries, tuple(missing))

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
                like = place.lstat() if change.before is not None else None
                self.files.write_new(place.with_name(entry.temporary), change.after, like)

    def _move_in(self, journal: Journal) -> None:
        """Replaces first, deletes last; each file is looked at once more just before."""
        for entry in sorted(journal.entries, key=lambda entry: entry.after is None):
            if self._is(entry, entry.after):
                continue
            if not self._is(entry, entry.before):
                raise CheckoutStateError("changed-meanwhile", path=entry.path, target=self.root)
            place = self._place(entry)
            check_folders(self.roots[entry.where], place)
            if entry.after is None:
                self.files.remove(place)
                self._drop_bytecode(place)
            else:
                self.files.replace(place.with_name(entry.temporary), place)
        gone = [e for e in journal.entries if e.after is None and e.where == "tree"]
        self._drop_empty_folders(gone)
        for folder in {self._place(entry).parent for entry in journal.entries}:
            if folder.is_dir():
                self.files.sync_folder(folder)
        for entry in journal.entries:
            if not self._is(entry, entry.after):
                raise OSError(0, "the disk does not hold what was written", str(entry.path))

    def _undo(self, journal: Journal, cause: BaseException) -> None:
        try:
            self._move_back(journal)
        except OSError as error:
            raise RollbackError(
                "disk-failed-again",
                path=self.state / JOURNAL_NAME,
                found=f"{cause}; then {error.strerror}",
                target=self.root,
            ) from error

    def _move_back(self, journal: Journal) -> None:
        """Puts every file that was replaced back, then removes every trace."""
        for number, entry in enumerate(journal.entries):
            if journal.committing and not self._is(entry, entry.before):
                if self._is(entry, entry.after):
                    self._restore(number, entry)
        self._tidy(journal)
        for folder in reversed(journal.folders):
            with contextlib.suppress(FileNotFoundError):
                if not any((self.root / folder).iterdir()):
                    self.files.remove_folder(self.root / folder)
        self._close()

    def _restore(self, number: int, entry: Entry) -> None:
        place = self._place(entry)
        check_folders(self.roots[entry.where], place)
        if entry.before is None:
            self.files.remove(place)
            return
        saved = (self.state / f"{ORIGINAL}{number}").read_bytes()
        if sha256_hex(saved) != entry.before:
            raise RollbackError("journal-broken", path=self.state / JOURNAL_NAME)
        temporary = place.with_name(entry.temporary)
        self._make_folders(place.parent)
        self.files.remove_if_there(temporary)
        like = place.lstat() if place.exists() else None
        self.files.write_new(temporary, saved, like)
        self.files.replace(temporary, place)
        self.files.sync_folder(place.parent)

    def _resolve(self, journal: Journal) -> str:
        entries = journal.entries
        for entry in entries:
            if journal.committing and not (self._is(entry, entry.before) or self._is(entry, entry.after)):
                raise CheckoutStateError(
                    "journal-conflict",
                    path=entry.path,
                    journal=self.state / JOURNAL_NAME,
                    target=self.root,
                )
        ahead = [entry for entry in entries if not self._is(entry, entry.after)]
        begun = any(not self._is(entry, entry.before) for entry in entries)
        if journal.committing and begun and all(self._is_ready(entry) for entry in ahead):
            self._move_in(journal)
            self._tidy(journal)
            self._close()
            return "finished"
        self._move_back(journal)
        return "undone"

    def _is_ready(self, entry: Entry) -> bool:
        if entry.after is None:
            return True
        try:
            data = self._place(entry).with_name(entry.temporary).read_bytes()
        except OSError:
            return False
        return sha256_hex(data) == entry.after

    def _tidy(self, journal: Journal) -> None:
        for entry in journal.entries:
            self.files.remove_if_there(self._place(entry).with_name(entry.temporary))

    def _close(self) -> None:
        self.files.remove_if_there(self.state / JOURNAL_NAME)
        journals.sweep(self.files, self.state)

    def _place(self, entry: Entry) -> Path:
        return self.roots[entry.where] / entry.path

    def _is(self, entry: Entry, digest: str | None) -> bool:
        found = read_plain(self.roots[entry.where], entry.path)
        return found.obstacle is None and _sha256(found.content) == digest

    def _make_folders(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folders(folder.parent)
            self.files.make_folder(folder)

    def _drop_bytecode(self, place: Path) -> None:
        """Python's cache of a removed module would keep its folder, and importable at that."""
        for cached in sorted((place.parent / "__pycache__").glob(f"{place.stem}.*.pyc")):
            self.files.remove(cached)

    def _drop_empty_folders(self, gone: Iterable[Entry]) -> None:
        for entry in gone:
            folder = self._place(entry).parent
            self._drop_if_empty(folder / "__pycache__")
            while folder not in (self.root, self.root / "verl") and self._drop_if_empty(folder):
                folder = folder.parent

    def _drop_if_empty(self, folder: Path) -> bool:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            self.files.remove_folder(folder)
            return True
        return not folder.exists()


def _sha256(data: bytes | None) -> str | None:
    return None if data is None else sha256_hex(data)


def _named(error: OSError, root: Path) -> str:
    name = str(error.filename or "a file")
    return name.removeprefix(f"{root}/")
