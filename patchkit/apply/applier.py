# SPDX-License-Identifier: Apache-2.0
"""What ``apply_patch.py`` does: apply, check, reverse, status. Returns reports, prints nothing."""

import os
import stat
from typing import Any

from ..errors import CheckoutStateError, quoted
from ..patch import language
from ..patch.content import read_regular
from ..patch.language import MAX_BYTES
from ..patch.manifest import Edition
from ..tree import disk
from ..tree.checkout import Checkout
from ..tree.disk import Filesystem
from ..tree.survey import State, Survey, survey
from ..tree.transaction import JOURNAL_NAME, KEPT_PATCH, Change, Transaction, preflight, read_journal
from . import explain
from .library import Library

Report = dict[str, Any]
"""The outcome of a command, as ``--json`` prints it; ``base`` is the tag of the verl that was picked, by content."""


class Applier:
    """Commands on one checkout with one library of editions."""

    def __init__(
        self,
        checkout: Checkout,
        library: Library,
        files: Filesystem | None = None,
        force: bool = False,
        wait_s: float = 0.0,
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
        holder = disk.holder(self.state_folder)
        if holder:
            raise disk.held(self.state_folder, holder)
        is_pending = read_journal(self.state_folder) is not None
        tree = self._survey()
        if is_pending:
            return self._report("check", tree, "would first undo an interrupted run")
        changes = self._changes(tree, None if reverse else tree.editions[0])
        preflight(self.checkout.root, self.state_folder, changes)
        return self._report("check", tree, f"would change {_count(changes)}" if changes else "nothing to do", changes)

    def status(self) -> Report:
        """Reports the state; changes nothing and never refuses a tree."""
        if disk.holder(self.state_folder):
            self.notes.append("another run is at work here: what is said may be out of date")
        if os.path.lexists(self.state_folder / JOURNAL_NAME):
            self.notes.append("a run was interrupted here; the next apply or --reverse undoes it first")
        tree = self._survey()
        return self._report("status", tree, tree.state.value)

    def _change(self, command: str) -> Report:
        with disk.locked(self.files, self.state_folder, self.checkout.git_dir is None, self.wait_s):
            if self.transaction.recover():
                self.notes.append("an interrupted run was undone first")
            tree = self._survey()
            goal = tree.editions[0] if command == "apply" else None
            changes = self._changes(tree, goal)
            preflight(self.checkout.root, self.state_folder, changes)
            if todo := changes + self._kept_copy(goal):
                self.transaction.run(todo)
            gone = [path for path, blob in tree.goal(goal).items() if blob is None]
            for place in self.transaction.drop_caches(gone):
                note = f"left behind, of another user: {place}   (sudo rm -r {quoted(place)}; it does no harm)"
                self.notes.append(note)
            return self._report(command, self._survey(), _did(tree, goal, changes), changes)

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

    def _changes(self, tree: Survey, goal: Edition | None) -> list[Change]:
        """The changes to ``goal``; refuses the states that it must not be reached from."""
        if tree.strangers:
            raise explain.refusal(tree, self.checkout, self.given, self.force)
        skipped = []
        if tree.state is State.PARTIAL and not tree.only_leftovers:
            skipped.append("the check that the checkout is not half patched")
            if not self.force:
                raise explain.half_patched(tree, self.checkout)
        unfinished = self.checkout.unfinished()
        if unfinished and tree.state is State.PRISTINE:
            self.notes.append(f"{unfinished} is under way in this checkout")
        elif unfinished:
            skipped.append(f"the check that no git operation is under way ({unfinished})")
            if not self.force:
                what, cause = f"{unfinished} is under way", "Files that change beneath it end in the wrong commit."
                next_ = f"Finish it first (git -C {quoted(self.checkout.root)} status says how), or add --force."
                raise CheckoutStateError("git-unfinished", what, cause, next_)
        if self.force:
            self.notes.append("--force skipped " + (" and ".join(skipped) or "nothing"))
        wanted = ((path, blob) for path, blob in sorted(tree.goal(goal).items()) if not tree.holds(path, blob))
        return [Change(path, tree.files[path].content, _content(path, blob, goal, tree)) for path, blob in wanted]

    def _report(self, command: str, tree: Survey, did: str, changes: list[Change] | None = None) -> Report:
        checkout, notes = self.checkout, list(self.notes)
        if checkout.head is None:
            notes.append(f"the commit is unknown here; verl says it is {checkout.version}")
        elif checkout.head != tree.base.commit:
            here = f"HEAD is {checkout.head[:12]}, not the base {tree.base.commit[:12]}"
            notes.append(f"{here}; what counts is the content of the files that the patch touches")
        if checkout.root.stat().st_uid != os.geteuid():
            notes.append("the checkout belongs to another user")
        return {
            "command": command,
            "did": did,
            "changed": [change.path for change in changes or ()],
            "notes": notes,
            "target": str(checkout.root),
            "kind": checkout.kind,
            "head": checkout.head,
            "verl_version": checkout.version,
            "base": tree.base.tag,
            "state": tree.state.name,
            "edition": tree.edition and tree.edition.version,
            "wanted": tree.editions[0].version,
            "files": explain.strangers(tree, self.given),
        }

    def _kept_copy(self, goal: Edition | None) -> list[Change]:
        """The change of the state folder: a copy of the patch, by which any build is known, and edits are told."""
        path, after = self.state_folder / KEPT_PATCH, goal.patch if goal else None
        if os.path.lexists(path):
            disk.check_kind(path, stat.S_ISREG, "plain file")
        before = path.read_bytes() if path.exists() else None
        return [Change(KEPT_PATCH, before, after, where="state")] if before != after else []


def _content(path: str, blob: str | None, goal: Edition | None, tree: Survey) -> bytes | None:
    """The content of ``path`` under ``goal``: what is there is first taken back to the base's, then forward."""
    if blob is None:
        return None
    there, base = tree.files[path], b""
    if tree.before[path] is not None:
        base = there.content or b""
        if not tree.holds(path, tree.before[path]):
            holding = (e.files[path] for e in tree.editions if path in e.files and e.files[path].after == there.blob)
            base = language.backward(next(holding), base)
    section = goal.files.get(path) if goal else None
    return language.forward(section, base) if section else base


def _count(changes: list[Change]) -> str:
    kinds = ["added" if c.before is None else "removed" if c.after is None else "modified" for c in changes]
    said = (f"{kinds.count(kind)} {kind}" for kind in ("modified", "added", "removed") if kind in kinds)
    return f"{len(changes)} files ({', '.join(said)})"


def _did(tree: Survey, goal: Edition | None, changes: list[Change]) -> str:
    if not changes:
        return f"{'already' if goal else 'not'} applied, nothing to do"
    if goal is None:
        return f"reversed: {_count(changes)}"
    is_upgrade = tree.state is State.OTHER_VERSION and tree.edition
    said = f"upgraded from {tree.edition.version} to" if is_upgrade and tree.edition else "applied"
    return f"{said} {goal.version}: {_count(changes)}"
