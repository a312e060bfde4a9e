# SPDX-License-Identifier: Apache-2.0
"""What ``apply_patch.py`` does: apply, check, reverse, status. Returns reports, prints nothing."""

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckoutStateError, LockedError
from ..patch.manifest import Edition
from ..tree import lock
from ..tree.checkout import Checkout
from ..tree.filesystem import Filesystem
from ..tree.preflight import preflight
from ..tree.survey import State, Survey, survey
from ..tree.transaction import Change, Transaction
from . import explain
from .library import Library
from .plan import changes_to

KEPT_PATCH, RECORD = "applied.patch", "applied.json"
MAX_STATE_BYTES = 5 * 2**20


@dataclass
class Report:
    """The outcome of a command, for people and for programs."""

    command: str
    target: str
    kind: str
    head: str | None
    verl_version: str
    state: str = ""
    edition: str | None = None
    wanted: str = ""
    changed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[dict[str, str]] = field(default_factory=list)
    did: str = ""


class Applier:
    """Commands on one checkout with one library of editions."""

    def __init__(
        self,
        checkout: Checkout,
        library: Library,
        files: Filesystem | None = None,
        force: bool = False,
    ) -> None:
        self.checkout = checkout
        self.library = library
        self.files = files or Filesystem()
        self.force = force
        self.state_folder = checkout.state_folder
        self.transaction = Transaction(self.files, checkout.root, self.state_folder)
        self.notes: list[str] = []

    def apply(self) -> Report:
        """Brings the checkout to the wanted edition, from whatever known state it is in."""
        return self._change("apply", self.library.wanted)

    def reverse(self) -> Report:
        """Brings the checkout back to the base, from whatever known state it is in."""
        return self._change("reverse", None)

    def check(self) -> Report:
        """Reports what ``apply`` would do, or raises what it would raise; changes nothing."""
        self._refuse_if_held()
        found = self._survey()
        if self.transaction.pending():
            report = self._report("check", found)
            report.did = "would first finish or undo an interrupted run"
            return report
        changes = self._changes(found, self.library.wanted)
        preflight(self.checkout.root, self.state_folder, changes)
        report = self._report("check", found)
        report.changed = [change.path for change in changes]
        report.did = f"would change {_count(changes)}" if changes else "nothing to do"
        return report

    def status(self) -> Report:
        """Reports the state; changes nothing and never refuses."""
        if lock.holder(self.state_folder):
            self.notes.append("another run is at work here: what is said may be out of date")
        if self.transaction.pending():
            self.notes.append("a run was interrupted here; the next apply or --reverse finishes or undoes it")
        found = self._survey()
        report = self._report("status", found)
        report.did = State[report.state].value
        return report

    def _change(self, command: str, goal: Edition | None) -> Report:
        with lock.locked(self.files, self.state_folder, hide=self.checkout.git_dir is None):
            resolved = self.transaction.recover()
            if resolved:
                self.notes.append(f"an interrupted run was {resolved} first")
            found = self._survey()
            changes = self._changes(found, goal)
            preflight(self.checkout.root, self.state_folder, changes)
            if changes:
                self.transaction.run(changes + self._record(goal))
            after = self._survey()
            report = self._report(command, after)
            report.changed = [change.path for change in changes]
            report.did = _did(command, found, goal, changes)
            return report

    def _refuse_if_held(self) -> None:
        holder = lock.holder(self.state_folder)
        if holder:
            raise LockedError("locked", path=self.state_folder, found=holder)

    def _survey(self) -> Survey:
        self._know_kept_patch()
        return survey(self.checkout, self.library.editions, self.library.manifest.base_commit)

    def _changes(self, found: Survey, goal: Edition | None) -> list[Change]:
        """The changes to ``goal``; refuses the states that it must not be reached from."""
        self._refuse_strangers(found)
        skipped = []
        if found.state is State.PARTIAL and not found.only_leftovers:
            if not self.force:
                raise CheckoutStateError("state-partial", **self._partial(found))
            skipped.append("the check that the checkout is not half patched")
        unfinished = self.checkout.unfinished()
        if unfinished and found.state is State.PRISTINE:
            self.notes.append(f"{unfinished} is under way in this checkout")
        elif unfinished:
            if not self.force:
                raise CheckoutStateError("git-unfinished", operation=unfinished, target=self.checkout.root)
            skipped.append(f"the check that no git operation is under way ({unfinished})")
        if self.force:
            self.notes.append("--force skipped " + (" and ".join(skipped) or "nothing"))
        return changes_to(goal, found, self.library)

    def _refuse_strangers(self, found: Survey) -> None:
        if found.state not in (State.DRIFTED, State.WRONG_BASE):
            return
        listed = explain.strangers(found, self.library)
        first = listed[0]
        reason = "state-drifted" if found.state is State.DRIFTED else "state-wrong-base"
        if all(stranger.why == explain.CRLF for stranger in listed):
            reason = "state-crlf"
        elif all(stranger.why.startswith(explain.EDITED) for stranger in listed):
            reason = "state-edited"
        elif all(found.base[stranger.path] is None for stranger in listed):
            reason = "state-in-the-way"
        raise CheckoutStateError(
            reason,
            state=found.state.name,
            target=self.checkout.root,
            path=first.path,
            expected=first.expected,
            found=first.found,
            why=first.why,
            count=len(listed),
            head=(self.checkout.head or "unknown")[:12],
            commit=self.library.manifest.base_commit[:12],
            files=[stranger.as_json() for stranger in listed],
            diff=[f"{stranger.path}: {stranger.why}" for stranger in listed],
            is_clone=self.checkout.git_dir is not None,
            unforced=" --force never overwrites such files." if self.force else "",
        )

    def _partial(self, found: Survey) -> dict[str, Any]:
        based = [path for path in found.found if found.is_base(path)]
        return {
            "state": found.state.name,
            "target": self.checkout.root,
            "found": f"{len(found.found) - len(based)} of {len(found.found)} files patched",
            "diff": [f"not patched: {path}" for path in based],
        }

    def _report(self, command: str, found: Survey) -> Report:
        checkout, base_commit = self.checkout, self.library.manifest.base_commit
        notes = list(self.notes)
        if checkout.head is None:
            notes.append(f"the commit is unknown here; verl says it is {checkout.version}")
        elif checkout.head != base_commit:
            notes.append(
                f"HEAD is {checkout.head[:12]}, not the base {base_commit[:12]}; "
                "what counts is the content of the files that the patch touches"
            )
        if checkout.root.stat().st_uid != os.geteuid():
            notes.append("the checkout belongs to another user")
        return Report(
            command,
            str(checkout.root),
            checkout.kind,
            checkout.head,
            checkout.version,
            state=found.state.name,
            edition=found.edition.version if found.edition else None,
            wanted=self.library.wanted.version,
            notes=notes,
            files=[stranger.as_json() for stranger in explain.strangers(found, self.library)],
        )

    def _record(self, goal: Edition | None) -> list[Change]:
        """Changes of the state folder: a copy of the patch, and a note for people.

        The copy lets a patch that is in no manifest (a development build, one from a file) be
        recognised and taken off again. Nothing is decided from the note.
        """
        wanted: dict[str, bytes | None] = {KEPT_PATCH: None, RECORD: None}
        if goal is not None:
            note = {
                "version": goal.version,
                "patch_sha256": goal.patch_sha256,
                "manifest_sha256": self._manifest_digest(),
                "applied_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            wanted[KEPT_PATCH] = self.library.patch(goal)
            wanted[RECORD] = (json.dumps(note, indent=1) + "\n").encode()
        changes = []
        for name, after in wanted.items():
            before = self._read_state(name)
            if before != after:
                changes.append(Change(name, before, after, where="state"))
        return changes

    def _manifest_digest(self) -> str:
        return hashlib.sha256((self.library.folder / "manifest.json").read_bytes()).hexdigest()

    def _read_state(self, name: str) -> bytes | None:
        path = self.state_folder / name
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None

    def _know_kept_patch(self) -> None:
        """Reads the copy anew each time: a recovery may have put another one in its place."""
        kept = self.state_folder / KEPT_PATCH
        if kept.is_file() and not kept.is_symlink() and kept.stat().st_size <= MAX_STATE_BYTES:
            note = f"the copy of an applied patch in {kept.parent.name} is no use"
            known = self.library.know_patch(kept.read_bytes(), "an earlier build")
            if not known and note not in self.notes:
                self.notes.append(note)


def _count(changes: list[Change]) -> str:
    counts = {
        "modified": sum(c.before is not None and c.after is not None for c in changes),
        "added": sum(c.before is None for c in changes),
        "removed": sum(c.after is None for c in changes),
    }
    said = ", ".join(f"{number} {label}" for label, number in counts.items() if number)
    return f"{len(changes)} files ({said})"


def _did(command: str, found: Survey, goal: Edition | None, changes: list[Change]) -> str:
    if not changes:
        return "already applied, nothing to do" if goal else "not applied, nothing to do"
    if goal is None:
        return f"reversed: {_count(changes)}"
    if found.state is State.OTHER_VERSION and found.edition:
        return f"upgraded from {found.edition.version} to {goal.version}: {_count(changes)}"
    return f"applied {goal.version}: {_count(changes)}"
