# SPDX-License-Identifier: Apache-2.0
"""Puts GradLoc's patch on a verl tree, or takes it off again.

Nothing is changed unless the content of every file that the patch touches is known, and then all of it or nothing.
Which verl it is, and so which patch, is decided by content. Exit codes: 0 done, or already so; 1 refused because of the
tree's state; 2 wrong usage; 3 the patch or its checksum is not what it should be; 4 the disk failed, everything was
put back; 5 the disk failed, run again to finish; 6 another run is at work.
"""

import argparse
import contextlib
import json
import re
import sys
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from .language import MAX_BYTES, apply_hunks, blob_id, parse, sha256_hex, short
from .refusal import INTEGRITY, RESTORE, STATE, Parser, Refusal, capped, guarded, program, quoted, say, say_json
from .tree import SEAM, Checkout, Edition, FileState, Survey, installed_root, read_regular, resolve, survey
from .write import APPLIED, JOURNAL, Change, Filesystem, Transaction, locked, preflight

PATCHES = Path(__file__).resolve().parents[1] / "patches"
PUBLISHED_ACTOR = "8ecaaf3c713c31116d8335e6f21f9f6b18668981"  # git's id of dp_actor.py under the public GradLoc patch
CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"


def load(folder: Path) -> list[Edition]:
    """The patches of the folder, each one verified by the manifest before a byte of it is used."""
    try:
        document = json.loads(read_regular(folder / "manifest.json", 2**16))
        editions = []
        for entry in document["patches"]:
            patch = read_regular(folder / entry["name"], MAX_BYTES)
            if sha256_hex(patch) != entry["sha256"]:
                raise ValueError(f"{entry['name']} has the sha256 {sha256_hex(patch)}, not {entry['sha256']}")
            editions.append(Edition(entry["base"], document["version"], parse(patch), patch))
        if not editions:
            raise ValueError("manifest.json names no patch")
        return editions
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what, cause = f"{folder} does not hold what its manifest names", "It was edited, converted, or cut off."
        raise Refusal(INTEGRITY, "patches-broken", what, cause, RESTORE, found=str(error)[:200]) from error


def diagnose(tree: Survey) -> Refusal:
    """The refusal of a tree that the patch can be neither put on nor taken off: what is there, and the way out."""
    checkout, edition, root = tree.checkout, tree.edition, quoted(tree.checkout.root)
    listed = [{"path": path, "why": _why(tree, path)} for path in tree.strangers]
    first, tag = tree.strangers[0] if listed else SEAM, edition.base.removeprefix("v")
    what, is_clone = f"{len(listed)} of the files that the patch touches", checkout.git_dir is not None
    reason, next_ = "state-drifted", f"Take {first} from verl {tag} again, then run this again."
    files, given = tree.files, _applied(checkout)
    minor = tuple(map(int, re.findall(r"\d+", checkout.version)[:2]))
    if tree.other_version:
        reason = "state-other-version"
        what = f"GradLoc {tree.other_version} has patched this tree, and this is {edition.version}"
        cause = "It was not taken off before the upgrade."
        place = f"cd GRADLOC-{tree.other_version}"
        next_ = f"{place} && python apply_patch.py {checkout.option} --reverse   (a clone of that version)"
        listed = []
    elif any(found.blob == PUBLISHED_ACTOR for found in files.values()):
        reason, what = "state-published", "the publicly released GradLoc patch is on this tree"
        cause = "With it every run stops at its first update."
        next_ = f"git -C {root} apply -R PUBLISHED.patch   (with the released file)"
    elif all(one["why"] == CRLF for one in listed):
        reason, what = "state-crlf", f"{what} have CRLF line ends, first {first}"
        cause = "The checkout was made with core.autocrlf, or through Windows; only the line ends differ."
        next_ = f"git clone -c core.autocrlf=false {root} DIR   (and use DIR)" if is_clone else next_
    elif files[first].obstacle:
        reason, what = "state-blocked", f"{first}: {files[first].obstacle}"
        cause, next_ = "It was replaced, or is another user's.", f"ls -ld {quoted(checkout.root / first)}"
    elif given is not None:
        reason, what = "state-edited", f"{what} were edited after it was applied, first {first}"
        cause = "Your own edits are in them."
        next_ = f"bash make_patch.sh --repo {root}   (if you work on the patch)"
        stash = f"git -C {root} stash push -u -- {' '.join(tree.strangers)}"
        next_ = f"{stash}   (keeps them aside; then this again, with --force)" if is_clone else next_
    elif minor >= (0, 8) and not tree.is_base:
        reason, what = "verl-without-patch", f"this is verl {checkout.version}, for which there is no patch"
        cause = "From 0.9 on, verl loads GradLoc as a plug-in; 0.8 has no room for either."
        next_ = "verl 0.9: pip install . and add +gradloc=on; verl 0.8: use another verl"
    elif not tree.is_base:
        reason = "state-wrong-base"
        what = f"this is verl {checkout.version}, and {what} differ from {tag}, first {first}"
        cause, next_ = "Another version of verl is here.", f"Use verl {tag}."
    else:
        what, cause = f"{what} hold neither verl's content nor the patch's, first {first}", "They were edited."
        if is_clone and all(files[path].content is not None for path in tree.strangers):
            patch = quoted(PATCHES / f"verl-{tag}.patch")
            next_ = f"git -C {root} add -- {' '.join(tree.strangers)} && git -C {root} apply --3way {patch}"
            next_ += "   (git merges both)"
    ids = {"expected": short(edition.files[first].before), "found": files[first].obstacle or short(files[first].blob)}
    lines = [f"{one['path']}: {one['why']}" for one in listed]
    more: dict[str, Any] = {"files": listed} | (ids if listed else {})
    return Refusal(STATE, reason, f"{tree.state}: {what}", cause, next_, state=tree.state, lines=lines, **more)


def _why(tree: Survey, path: str) -> str:
    found, file = tree.files[path], tree.edition.files[path]
    if found.content is None:
        return found.obstacle or "the file is missing"
    plain = found.content.replace(b"\r\n", b"\n")
    if plain != found.content and blob_id(plain) in (file.before, file.after):
        return CRLF
    if file.before is None:
        return "another file stands where the patch adds one"
    if re.search(rb"^<{7} ", found.content, re.MULTILINE) or (tree.checkout.root / f"{path}.rej").exists():
        return "a merge or `git apply --reject` left it half done"
    try:
        apply_hunks(path, file.hunks, found.content)
    except Refusal as error:
        return error.what.replace(f" of {path}", "")
    return "it was edited, but not where the patch edits it"


def _applied(checkout: Checkout) -> bytes | None:
    try:
        return read_regular(checkout.state_folder / APPLIED)
    except OSError:
        return None


class Applier:
    """The commands on one checkout."""

    def __init__(self, checkout: Checkout, editions: list[Edition], force: bool = False, wait_s: float = 0.0) -> None:
        self.checkout, self.editions, self.force, self.wait_s = checkout, editions, force, wait_s
        self.files, self.notes = Filesystem(), list[str]()

    def status(self) -> Survey:
        """Looks; an interrupted run is named, not undone."""
        if (self.checkout.state_folder / JOURNAL).exists():
            self.notes.append("a run was interrupted here: the next one first puts back what it changed")
        return survey(self.checkout, self.editions)

    def plan(self, reverse: bool) -> tuple[Survey, list[Change]]:
        """The changes that lead to the patch, or back to the base; refuses the states that they must not start from."""
        tree, state = self.status(), self.checkout.state_folder
        before = Transaction(self.files, self.checkout.root, state).interrupted()
        restored = {path: FileState(data) for path, data in before.items() if path in tree.files}
        tree = replace(tree, files=tree.files | restored)
        if tree.strangers or tree.other_version:
            raise diagnose(tree)
        if tree.state == "PARTIAL" and not self.force:
            lacking = [path for path in tree.files if not tree.holds(path, True)]
            what = "PARTIAL: the tree is half patched"
            cause = "Files were restored by hand or by git; each one is known."
            found = f"{len(tree.files) - len(lacking)} of {len(tree.files)} files patched"
            data = {"state": tree.state, "lines": [f"not patched: {path}" for path in lacking], "found": found}
            next_ = f"{self.checkout.command} --force   (finishes; with --reverse it undoes)"
            raise Refusal(STATE, "state-partial", what, cause, next_, **data)
        changes = []
        for path, file in sorted(tree.edition.files.items()):
            there = tree.files[path].content
            if reverse and tree.holds(path, True):
                changes.append(Change(path, there, None if file.before is None else file.backward(there or b"")))
            elif not reverse and not tree.holds(path, True):
                changes.append(Change(path, there, file.forward(there or b"")))
        unfinished = self.checkout.unfinished()
        if unfinished and changes and not self.force:
            what, cause = f"{unfinished} is under way", "Files that change beneath it end in the wrong commit."
            raise Refusal(STATE, "git-unfinished", what, cause, "Finish it first, or add --force.")
        preflight(self.checkout.root, state, changes)
        return tree, changes

    def run(self, reverse: bool) -> tuple[Survey, list[Change]]:
        """Puts the patch on, or takes it off."""
        root, state = self.checkout.root, self.checkout.state_folder
        try:
            with locked(self.files, state, self.wait_s):
                transaction = Transaction(self.files, root, state)
                if transaction.recover([path for edition in self.editions for path in edition.files]):
                    self.notes.append("put back what an interrupted run had changed")
                tree, changes = self.plan(reverse)
                applied = None if reverse else tree.edition.patch
                if changes or _applied(self.checkout) != applied:
                    transaction.run(changes, applied)
        except Refusal as refusal:  # where nothing may be written there may be nothing to do
            if refusal.reason != "blocked-permission" or (state / JOURNAL).exists():
                raise
            tree, changes = self.plan(reverse)
            if changes:
                raise
        for change in changes if reverse else ():
            with contextlib.suppress(OSError):  # of another user's; it does no harm
                Path(cache_from_source(str(root / change.path))).unlink()
        return survey(self.checkout, self.editions), changes


def parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    made = Parser(prog=program(), description=__doc__, allow_abbrev=False)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("target", nargs="?", metavar="VERL", help="the same as --repo VERL")
    add("--repo", metavar="VERL", help="the top folder of a verl tree")
    add("--installed", action="store_true", help="the verl package of the Python that runs this")
    add("--check", action="store_true", help="predict everything (with --reverse: of that), change nothing")
    add("--status", action="store_true", help="say which state the tree is in")
    add("--reverse", action="store_true", help="take the patch off again")
    add("--wait", type=float, default=0.0, metavar="SECONDS", help="how long to wait for another run in the tree")
    add("--force", action="store_true", help="finish or undo a half patched tree, work while git is; says so")
    add("--json", action="store_true", help="print one JSON object, for refusals too")
    add("--quiet", action="store_true", help="print errors only (with --status: the state alone)")
    add("--debug", action="store_true", help="show a traceback on an error")
    add("--patches", type=Path, default=PATCHES, help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(parser().parse_args(given)), given)


def _run(options: argparse.Namespace) -> int:
    if options.status and (options.check or options.reverse):
        parser().error("--status does not go with --check or --reverse")
    targets = [place for place in (options.repo, options.target) if place is not None]
    if len(targets) + options.installed != 1:
        parser().error(f"exactly one target is needed, and {len(targets) + options.installed} were named")
    editions = load(options.patches)
    target = str(installed_root()) if options.installed else targets[0]
    applier = Applier(resolve(target, options.installed), editions, options.force, options.wait)
    changes: list[Change] = []
    if options.status:
        tree = applier.status()
    elif options.check:
        tree, changes = applier.plan(options.reverse)
    else:
        tree, changes = applier.run(options.reverse)
    _print(tree, changes, applier, options)
    return int(options.status and tree.state not in ("PRISTINE", "APPLIED"))


def _print(tree: Survey, changes: list[Change], applier: Applier, options: argparse.Namespace) -> None:
    verb = "take off" if options.reverse else "apply"
    done = ("taken off" if options.reverse else "applied") if not options.check else f"would {verb}"
    files = [change.path for change in changes]
    did = f"{done}: {len(files)} files" if files else f"nothing to {verb}"
    if options.json:
        files_ = [{"path": path, "why": _why(tree, path)} for path in tree.strangers]
        document = {"exit_code": int(bool(files_)), "state": tree.state, "base": tree.edition.base, "changed": files}
        say_json(document | {"version": tree.edition.version, "notes": applier.notes, "files": files_, "did": did})
    elif options.status and options.quiet:
        say(tree.state)
    elif not options.quiet:
        lines = [tree.state if options.status else did]
        lines += [f"  target:   {tree.checkout.root} ({tree.checkout.kind} of verl {tree.checkout.version})"]
        lines += [f"  patch:    {tree.edition.version} for verl {tree.edition.base}"]
        lines += [f"  {one}" for one in capped([f"{p}: {_why(tree, p)}" for p in tree.strangers] or files)]
        lines += [f"  note:     {note}" for note in applier.notes]
        if tree.state == "APPLIED" and not options.check:
            lines += ["  next:     pip install . in the clone of GradLoc, on every node, if it is not there yet"]
        say("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
