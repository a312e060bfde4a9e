# SPDX-License-Identifier: Apache-2.0
"""What ``apply_patch.py`` does: apply, check, reverse, status. Returns reports, prints nothing."""

import os
import stat
from dataclasses import asdict, dataclass, field

from ..errors import CheckoutStateError, quoted
from ..patch import splice
from ..patch.content import read_regular
from ..patch.edition import Edition
from ..patch.language import MAX_BYTES
from ..tree import journal, lock
from ..tree.checkout import Checkout
from ..tree.filesystem import Filesystem
from ..tree.preflight import preflight
from ..tree.survey import State, Survey, survey
from ..tree.transaction import Change, Transaction
from . import explain
from .library import Library

KEPT_PATCH, OLD_RECORD = journal.STATE_FILES


@dataclass
class Report:
    """The outcome of a command; ``base`` is the tag of the verl whose patch was picked, by content."""

    command: str
    target: str
    kind: str
    head: str | None
    verl_version: str
    base: str
    state: str
    edition: str | None
    wanted: str
    did: str
    changed: list[str]
    notes: list[str]
    files: list[dict[str, str]] = field(default_factory=list)


class Applier:
    """Commands on one checkout with one library of editions."""

    def __init__(
        self,
        checkout: Checkout,
        library: Library,
        files: Filesystem | None = None,
        force: bool = False,
        wait_s: float = 0,
    ) -> None:
        self.checkout, self.library, self.force, self.wait_s = checkout, library, force, wait_s
        self.files = files or Filesystem()
        self.state_folder = checkout.state_folder
        self.transaction = Transaction(self.files, checkout.root, self.state_folder)
        self.notes: list[str] = []
        self.given: Edition | None = None

    def apply(self) -> Report:
        """Brings the checkout to the wanted edition, from whatever known state it is in."""
        return self._change("apply")

    def reverse(self) -> Report:
        """Brings the checkout back to the base, from whatever known state it is in."""
        return self._change("reverse")

    def check(self, reverse: bool = False) -> Report:
        """Reports what ``apply`` or ``reverse`` would do, or raises what it would raise; changes nothing."""
        holder = lock.holder(self.state_folder)
        if holder:
            raise lock.held(self.state_folder, holder)
        is_pending = journal.read(self.state_folder) is not None
        found = self._survey()
        if is_pending:
            return self._report("check", found, "would first undo an interrupted run")
        changes = self._changes(found, None if reverse else found.editions[0])
        preflight(self.checkout.root, self.state_folder, changes)
        return self._report("check", found, f"would change {_count(changes)}" if changes else "nothing to do", changes)

    def status(self) -> Report:
        """Reports the state; changes nothing and never refuses a tree."""
        if lock.holder(self.state_folder):
            self.notes.append("another run is at work here: what is said may be out of date")
        if os.path.lexists(self.state_folder / journal.JOURNAL_NAME):
            self.notes.append("a run was interrupted here; the next apply or --reverse undoes it first")
        found = self._survey()
        return self._report("status", found, found.state.value)

    def _change(self, command: str) -> Report:
        with lock.locked(self.files, self.state_folder, self.checkout.git_dir is None, self.wait_s):
            if self.transaction.recover():
                self.notes.append("an interrupted run was undone first")
            found = self._survey()
            goal = found.editions[0] if command == "apply" else None
            changes = self._changes(found, goal)
            preflight(self.checkout.root, self.state_folder, changes)
            todo = changes + self._kept_copy(goal)
            if any(change.path != OLD_RECORD for change in todo):
                self.transaction.run(todo)
            gone = [path for path, blob in found.goal(goal).items() if blob is None]
            for place in self.transaction.drop_caches(gone):
                note = f"left behind, of another user: {place}   (sudo rm -r {quoted(place)}; it does no harm)"
                self.notes.append(note)
            did = _did(found, goal, changes) if changes else f"{'already' if goal else 'not'} applied, nothing to do"
            return self._report(command, self._survey(), did, changes)

    def _survey(self) -> Survey:
        """Reads the copy of what was applied anew each time: a recovery may have put another one in its place."""
        self.given = None
        if (self.state_folder / KEPT_PATCH).is_file():
            try:
                self.given = self.library.know_patch(read_regular(self.state_folder / KEPT_PATCH, MAX_BYTES))
            except OSError:
                pass
            note = f"the copy of an applied patch in {self.state_folder.name} is no use"
            self.notes += [note] if self.given is None and note not in self.notes else []
        return survey(self.checkout, self.library.families)

    def _changes(self, found: Survey, goal: Edition | None) -> list[Change]:
        """The changes to ``goal``; refuses the states that it must not be reached from."""
        if found.strangers:
            raise explain.refusal(found, self.checkout, self.given, self.force)
        skipped = []
        if found.state is State.PARTIAL and not found.only_leftovers:
            skipped.append("the check that the checkout is not half patched")
            if not self.force:
                raise explain.half_patched(found, self.checkout)
        unfinished = self.checkout.unfinished()
        if unfinished and found.state is State.PRISTINE:
            self.notes.append(f"{unfinished} is under way in this checkout")
        elif unfinished:
            skipped.append(f"the check that no git operation is under way ({unfinished})")
            if not self.force:
                what, cause = f"{unfinished} is under way", "Files that change beneath it end in the wrong commit."
                next_ = f"Finish it first (git -C {quoted(self.checkout.root)} status says how), or add --force."
                raise CheckoutStateError("git-unfinished", what, cause, next_)
        if self.force:
            self.notes.append("--force skipped " + (" and ".join(skipped) or "nothing"))
        wanted = ((path, blob) for path, blob in sorted(found.goal(goal).items()) if not found.holds(path, blob))
        return [Change(path, found.found[path].content, _content(path, blob, goal, found)) for path, blob in wanted]

    def _report(self, command: str, found: Survey, did: str, changes: list[Change] | None = None) -> Report:
        checkout, notes = self.checkout, list(self.notes)
        if checkout.head is None:
            notes.append(f"the commit is unknown here; verl says it is {checkout.version}")
        elif checkout.head != found.base.commit:
            here = f"HEAD is {checkout.head[:12]}, not the base {found.base.commit[:12]}"
            notes.append(f"{here}; what counts is the content of the files that the patch touches")
        if checkout.root.stat().st_uid != os.geteuid():
            notes.append("the checkout belongs to another user")
        edition, wanted = found.edition.version if found.edition else None, found.editions[0].version
        tree = (str(checkout.root), checkout.kind, checkout.head, checkout.version, found.base.tag, found.state.name)
        changed = [change.path for change in changes or ()]
        files = [asdict(stranger) for stranger in explain.strangers(found, self.given)]
        return Report(command, *tree, edition, wanted, did, changed, notes, files)

    def _kept_copy(self, goal: Edition | None) -> list[Change]:
        """Changes of the state folder: a copy of the patch.

        The copy lets a patch that is in no manifest (a development build, one from a file) be recognised and taken off
        again, and says what a checkout's edits are edits of.
        """
        changes = []
        for name, after in ((KEPT_PATCH, goal.patch if goal else None), (OLD_RECORD, None)):
            path = self.state_folder / name
            if os.path.lexists(path):
                lock.check_kind(path, stat.S_ISREG, "plain file")
            before = path.read_bytes() if path.exists() else None
            changes += [Change(name, before, after, where="state")] if before != after else []
        return changes


def _content(path: str, blob: str | None, goal: Edition | None, found: Survey) -> bytes | None:
    """The content of ``path`` under ``goal``: what is there is first taken back to the base's, then forward."""
    if blob is None:
        return None
    there, base = found.found[path], b""
    if found.before[path] is not None:
        base = there.content or b""
        if not found.holds(path, found.before[path]):
            holding = (e.files[path] for e in found.editions if path in e.files and e.files[path].after == there.blob)
            base = splice.backward(next(holding), base)
    section = goal.files.get(path) if goal else None
    return splice.forward(section, base) if section else base


def _count(changes: list[Change]) -> str:
    kinds = ["added" if c.before is None else "removed" if c.after is None else "modified" for c in changes]
    said = (f"{kinds.count(kind)} {kind}" for kind in ("modified", "added", "removed") if kind in kinds)
    return f"{len(changes)} files ({', '.join(said)})"


def _did(found: Survey, goal: Edition | None, changes: list[Change]) -> str:
    if goal is None:
        return f"reversed: {_count(changes)}"
    is_upgrade = found.state is State.OTHER_VERSION and found.edition
    said = f"upgraded from {found.edition.version} to" if is_upgrade and found.edition else "applied"
    return f"{said} {goal.version}: {_count(changes)}"
