# SPDX-License-Identifier: Apache-2.0
"""Puts GradLoc's patch, or one that is named, on a verl tree, or takes it off again.

Nothing is changed unless the content of every file that the patch touches is known, and then all of it or nothing. Exit
codes: 0 done, or already so; 1 the tree's state; 2 wrong usage; 3 a patch, its checksum or a download is not what it
should be; 4 the disk failed, all was put back; 5 not all, run again; 6 another run is at work; 7 no server.
"""

import argparse
import contextlib
import json
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .fetch import fetch_patch
from .language import MAX_BYTES, FilePatch, apply_hunks, parse, sha256_hex
from .refusal import INTEGRITY, RESTORE, STATE, Parser, Refusal, capped, guarded, program, quoted, say, say_json
from .tree import SEAM, Checkout, FileState, installed_root, read_plain, read_regular, read_text, resolve
from .write import interrupted, locked, preflight, recover, remembered, swap

PATCHES = Path(__file__).resolve().parents[1] / "patches"
PUBLISHED_ACTOR = "8ecaaf3c713c31116d8335e6f21f9f6b18668981"  # git's id of dp_actor.py under the public GradLoc patch
CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"


@dataclass(frozen=True)
class Edition:
    """Holds a patch: its name, the verl it is for, its place, its bytes and sections; the files before, if known."""

    name: str
    base: str | None
    place: Path | None
    patch: bytes
    files: dict[str, FilePatch]
    before: dict[str, bytes | None] = field(default_factory=dict)

    def sides(self, path: str, found: FileState) -> tuple[bytes | None, bytes] | None:
        """Return a file's contents before and after; None if what is there is neither."""
        if found.obstacle or path not in self.before:
            return None if found.obstacle else self.files[path].sides(found.content)
        known = self.before[path], self.files[path].forward(self.before[path])
        return known if found.content in known else None


def load(folder: Path) -> tuple[str, list[Edition]]:
    """Return the version and the patches of the folder, each verified by the manifest before a byte of it is used."""
    try:
        document, editions = json.loads(read_regular(folder / "manifest.json", 2**16)), []
        for entry in document["patches"]:
            patch = read_regular(place := folder / entry["name"], MAX_BYTES)
            if sha256_hex(patch) != entry["sha256"]:
                raise ValueError(f"{entry['name']} has the sha256 {sha256_hex(patch)}, not {entry['sha256']}")
            name, base = f"{document['version']} for verl {entry['base']}", entry["base"].removeprefix("v")
            editions.append(Edition(name, base, place, patch, parse(patch)))
        return document["version"] if editions else document["no patch"], editions
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what, cause = f"{folder} does not hold what its manifest names", "It was edited, converted, or cut off."
        raise Refusal(INTEGRITY, "patches-broken", what, cause, RESTORE, found=str(error)[:200]) from error


@dataclass(frozen=True)
class Survey:
    """Measures a checkout against a patch; ``other`` is another one that is on the tree."""

    checkout: Checkout
    edition: Edition
    version: str
    files: dict[str, FileState]
    other: str | None = None

    @cached_property
    def sides(self) -> dict[str, tuple[bytes | None, bytes] | None]:
        """Each file's contents before and after; None if what is there is neither."""
        return {path: self.edition.sides(path, found) for path, found in self.files.items()}

    @cached_property
    def strangers(self) -> dict[str, str]:
        """Why what is there is neither, by path."""
        return {path: self._why(path, self.files[path]) for path, known in self.sides.items() if known is None}

    @cached_property
    def unpatched(self) -> list[str]:
        """The files that are as they were before the patch."""
        return [path for path, known in self.sides.items() if known and self.files[path].content == known[0]]

    @cached_property
    def row(self) -> tuple[Any, ...]:
        """The line of ``STATES`` that holds; it begins with the state."""
        return next(row for row in STATES if row[2](self))

    @cached_property
    def is_base(self) -> bool:
        """Whether verl says that it is the patch's, or the patch does not say."""
        return self.edition.base in (None, self.checkout.version.removesuffix(".dev"))

    @cached_property
    def older(self) -> str | None:
        """The version of our patch that is on, if it is another one: 0.1 to 0.3 had a package of their own in verl."""
        package = read_text(self.checkout.root / "verl/gradloc/__init__.py")
        text = package or (read_text(self.checkout.root / SEAM) if SEAM in self.strangers else "")
        found = re.search(r'^(?:__version__|VERSION) = "([0-9A-Za-z.+-]{1,40})"', text, re.MULTILINE)
        version = found[1] if found else "0.1.0" if package else self.version
        return version if version != self.version else None

    def _why(self, path: str, found: FileState) -> str:
        file, there = self.edition.files[path], found.content
        if there is None:
            return found.obstacle or "the file is missing"
        if b"\r\n" in there and file.sides(there.replace(b"\r\n", b"\n")):
            return CRLF
        if file.before is None:
            return "another file is where the patch adds one"
        if re.search(rb"^<{7} ", there, re.MULTILINE) or (self.checkout.root / f"{path}.rej").exists():
            return "a merge or `git apply --reject` left it half done"
        try:
            apply_hunks(path, file.hunks, there)
        except Refusal as error:
            return error.what.replace(f" of {path}", "")
        return "it was edited, but not where the patch edits it"


def _is_new(tree: Survey) -> bool:
    return tuple(map(int, re.findall(r"\d+", tree.checkout.version)[:2])) >= (0, 8)


_N = "{n} of the files that the patch touches"
STATES: tuple[tuple[Any, ...], ...] = (
    # state, reason of its refusal, whether it holds, what, cause, next; the first line that holds is the tree's
    ("OTHER_VERSION", "state-other-patch", lambda t: t.other, "another patch ({t.other}) is on this tree",
     "Patches are put on one at a time.", "{t.checkout.command} --reverse   (then this again)"),
    ("OTHER_VERSION", "state-other-version", lambda t: t.older, "GradLoc {t.older} has patched this tree",
     "It was not taken off before the upgrade.",
     "cd GRADLOC-{t.older} && python apply_patch.py --repo {root} --reverse   (a clone of that version)"),
    ("APPLIED", "", lambda t: not t.strangers and not t.unpatched, "", "", ""),
    ("PRISTINE", "", lambda t: not t.strangers and len(t.unpatched) == len(t.files), "", "", ""),
    ("PARTIAL", "state-partial", lambda t: not t.strangers, "the tree is half patched, {n} of {all} files are not",
     "Files were restored by hand or by git; each one is known.",
     "{t.checkout.command} --force   (finishes; with --reverse it undoes)"),
    ("DRIFTED", "state-published", lambda t: any(found.blob == PUBLISHED_ACTOR for found in t.files.values()),
     "the publicly released GradLoc patch is on this tree", "With it every run stops at its first update.",
     "git -C {root} apply -R PUBLISHED.patch   (with the released file)"),
    ("WRONG_BASE", "verl-without-patch", lambda t: not t.is_base and _is_new(t),
     "this is verl {t.checkout.version}, for which there is no patch",
     "From 0.9 on, verl loads GradLoc as a plug-in; 0.8 has no room for either.",
     "verl 0.9: pip install . and add +gradloc=on; verl 0.8: use another verl"),
    ("WRONG_BASE", "state-wrong-base", lambda t: not t.is_base,
     "this is verl {t.checkout.version}, and " + _N + " differ from {t.edition.base}'s, first {first}",
     "Another version of verl is here.", "Use verl {t.edition.base}."),
    ("DRIFTED", "state-crlf", lambda t: {*t.strangers.values()} == {CRLF}, _N + " have CRLF line ends, first {first}",
     "The checkout was made with core.autocrlf, or through Windows; only the line ends differ.",
     "git clone -c core.autocrlf=false {root} DIR   (and use DIR)"),
    ("DRIFTED", "state-blocked", lambda t: t.files[next(iter(t.strangers))].obstacle, "{first}: {why}",
     "It was replaced, or is another user's.", "ls -ld {place}"),
    ("DRIFTED", "state-edited", lambda t: t.edition.before,
     _N + " were edited after it was applied, first {first}", "Your own edits are in them.",
     "git -C {root} stash push -u -- {names}   (keeps them aside; then this again, with --force)"),
    ("DRIFTED", "state-drifted", lambda t: t.checkout.kind == "clone" and t.edition.place and all(
        t.files[path].content is not None for path in t.strangers),
     _N + " hold neither verl's content nor the patch's, first {first}", "They were edited.",
     "git -C {root} add -- {names} && git -C {root} apply --3way {patch}   (git merges both)"),
    ("DRIFTED", "state-drifted", lambda t: True, _N + " are neither as before nor as after it, first {first}",
     "They were edited.", "Restore {first} as verl has it, then run this again."),
)  # fmt: skip


def diagnose(tree: Survey) -> Refusal:
    """Make the refusal of a tree that the patch can be neither put on nor taken off."""
    state, reason, _, *texts = tree.row
    why, root = tree.strangers if state != "OTHER_VERSION" else {}, tree.checkout.root
    names = [*(why or tree.unpatched or tree.files)]
    words = {"root": quoted(root), "place": quoted(root / names[0]), "patch": quoted(tree.edition.place)}
    words |= {"first": names[0], "names": " ".join(names), "why": why.get(names[0], "")}
    what, cause, next_ = (text.format(t=tree, n=len(names), all=len(tree.files), **words) for text in texts)
    lines = [f"{path}: {one}" for path, one in why.items()] or [f"not patched: {path}" for path in tree.unpatched]
    data: dict[str, Any] = {"state": state, "lines": lines, "files": [{"path": p, "why": w} for p, w in why.items()]}
    if why:
        ids = tree.edition.files[names[0]].before, tree.files[names[0]].blob
        data["expected"], data["found"] = (f"git blob {one[:12]}" if one else "no file" for one in ids)
    return Refusal(STATE, reason, f"{state}: {what}", cause, next_, **data)


def survey(checkout: Checkout, version: str, editions: list[Edition], is_wanted: bool) -> Survey:
    """Measure the checkout against the edition that fits it best, as it is once an interrupted run is undone.

    Where another patch is on, that one is measured, or named, if they are what ``is_wanted``.
    """
    root, state = checkout.root, checkout.state_folder
    back = {path: FileState(now) for path, (now, _) in interrupted(root, state).items()}
    patch, before = remembered(state) or (b"", {})

    def measured(edition: Edition) -> Survey:
        files = {path: back.get(path) or read_plain(root, path) for path in edition.files}
        edition = replace(edition, before=before) if edition.patch == patch else edition
        return Survey(checkout, edition, version, files)

    best = min(map(measured, editions), key=lambda one: (bool(one.strangers), not one.is_base, len(one.strangers)))
    if patch and all(patch != edition.patch for edition in editions) and best.row[0] != "APPLIED":
        name = f"sha256 {sha256_hex(patch)[:12]}"
        there = measured(Edition(name, None, None, patch, parse(patch)))
        if there.row[0] in ("APPLIED", "PARTIAL"):
            return replace(best, other=name) if is_wanted else there
    return best


def plan(tree: Survey, reverse: bool, force: bool) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Return the changes that lead to the patch, or back; refuse a state that they must not start from."""
    if tree.row[1] and not (tree.row[0] == "PARTIAL" and force):
        raise diagnose(tree)
    goals = {path: known[not reverse] for path, known in sorted(tree.sides.items()) if known}
    changes = {path: (tree.files[path].content, goal) for path, goal in goals.items()}
    changes = {path: (now, then) for path, (now, then) in changes.items() if now != then}
    if changes and not force and (unfinished := tree.checkout.unfinished()):
        what, cause = f"git is at work here ({unfinished})", "Files that change beneath it end in the wrong commit."
        raise Refusal(STATE, "git-unfinished", what, cause, "Finish it first, or add --force.")
    preflight(tree.checkout.root, tree.checkout.state_folder, changes)
    return changes


OPTIONS: dict[str, dict[str, Any]] = {
    "target": {"nargs": "?", "metavar": "VERL", "help": "the same as --repo VERL"},
    "--repo": {"metavar": "VERL", "help": "the top folder of a verl tree"},
    "--installed": {"help": "the verl package of the Python that runs this"},
    "--check": {"help": "predict everything (with --reverse: of that), change nothing"},
    "--status": {"help": "say which state the tree is in"},
    "--reverse": {"help": "take off the patch that is on"},
    "--patch-file": {"metavar": "F", "help": "another patch than this repository's; F.sha256 has its sum"},
    "--patch-url": {"metavar": "URL", "help": "the same, by https; needs its sum, and the package requests"},
    "--sha256-file": {"metavar": "F|URL", "help": "the sum of that patch, as sha256sum prints it"},
    "--sha256": {"metavar": "HEX", "help": "the sum itself"},
    "--wait": {"type": float, "default": 0.0, "metavar": "SECONDS", "help": "how long to wait for another run here"},
    "--force": {"help": "finish or undo a half patched tree, work while git is"},
    "--json": {"help": "print one JSON object, for refusals too"},
    "--quiet": {"help": "print errors only (with --status: the state alone)"},
    "--debug": {"help": "show a traceback on an error"},
    "--patches": {"type": Path, "default": PATCHES, "help": argparse.SUPPRESS},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(prog=program(), description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, about in OPTIONS.items():
        parser.add_argument(name, **about | ({} if len(about) > 1 else {"action": "store_true"}))
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(parser, parser.parse_args(given)), given)


def _run(parser: Parser, options: argparse.Namespace) -> int:
    named = [place for place in (options.patch_file, options.patch_url) if place is not None]
    sums = [place for place in (options.sha256_file, options.sha256) if place is not None]
    targets = [place for place in (options.repo, options.target) if place is not None]
    if len(targets) + options.installed != 1:
        parser.error(f"exactly one target is needed, and {len(targets) + options.installed} were named")
    if options.status and (options.check or options.reverse):
        parser.error("--status does not go with --check or --reverse")
    if len(named) > 1 or len(sums) > len(named) or "://" not in (options.patch_url or "://"):
        parser.error("a patch is one --patch-file F or one --patch-url URL, its sum one --sha256-file or one --sha256")
    version, editions = load(options.patches)
    checkout = resolve(str(installed_root()) if options.installed else targets[0], options.installed)
    if named:
        patch = fetch_patch(named[0], options.sha256_file, options.sha256, [sha256_hex(e.patch) for e in editions])
        foreign = Edition(f"{named[0]}, sha256 {sha256_hex(patch)[:12]}", None, None, patch, parse(patch))
        editions = [one for one in editions if one.patch == patch] or [foreign]
    root, state, note, changes = checkout.root, checkout.state_folder, "", {}
    only_looks, is_wanted = options.status or options.check, bool(named) or not (options.status or options.reverse)
    with contextlib.nullcontext() if only_looks else locked(root, options.wait):
        if only_looks and interrupted(root, state):
            note = "a run was interrupted here: the next one first puts back what it changed"
        elif not only_looks and recover(root, state):
            note = "put back what an interrupted run had changed"
        tree = survey(checkout, version, editions, is_wanted)
        if not options.status:
            changes = plan(tree, options.reverse, options.force)
        if changes and not options.check:
            before = {path: known[0] for path, known in tree.sides.items() if known}
            swap(root, state, changes, None if options.reverse else (tree.edition.patch, before))
            tree = survey(checkout, version, [tree.edition], True)
    _print(tree, [*changes], note, options)
    return int(options.status and tree.row[0] not in ("PRISTINE", "APPLIED"))


def _print(tree: Survey, files: list[str], note: str, options: argparse.Namespace) -> None:
    verb = "take off" if options.reverse else "apply"
    done = f"would {verb}" if options.check else "taken off" if options.reverse else "applied"
    did = f"{done}: {len(files)} files" if files else f"nothing to {verb}"
    if options.json:
        why = [{"path": path, "why": why} for path, why in tree.strangers.items()]
        document = {"exit_code": int(bool(why)), "state": tree.row[0], "patch": tree.edition.name, "did": did}
        say_json(document | {"files": why, "notes": [note] if note else [], "changed": files})
    elif options.status and options.quiet:
        say(tree.row[0])
    elif not options.quiet:
        say(tree.row[0] if options.status else did)
        say(f"  target:   {tree.checkout.root} ({tree.checkout.kind} of verl {tree.checkout.version})")
        say(f"  patch:    {tree.edition.name}")
        for line in capped([f"{path}: {why}" for path, why in tree.strangers.items()] or files):
            say(f"  {line}")
        if note:
            say(f"  note:     {note}")
        if tree.row[0] == "APPLIED" and tree.edition.base:
            say("  next:     pip install . in the clone of GradLoc, on every node, if it is not there yet")


if __name__ == "__main__":
    sys.exit(main())
