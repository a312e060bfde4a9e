# SPDX-License-Identifier: Apache-2.0
"""Apply GradLoc's patch, or a given one, to a verl tree, or remove it.

Files are changed only if the content of every file of the patch is known, and then all or none. Exit codes: 0 done, or
nothing to do; 1 the tree's state; 2 wrong usage; 3 a wrong patch, checksum or download; 4 the disk failed, all was
restored; 5 not all was restored, run again; 6 another run is active; 7 no server.
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import tree as trees
from .patch import MAX_BYTES, FilePatch, apply_hunks, fetch_patch, parse, read_regular, sha256_hex
from .refusal import Parser, Refusal, capped, guarded, program, say
from .tree import Checkout, FileState, installed_root, read_plain, resolve

PATCHES = Path(__file__).resolve().parents[1] / "patches"
PUBLISHED_ACTOR = "8ecaaf3c713c31116d8335e6f21f9f6b18668981"  # git's id of dp_actor.py under the public GradLoc patch
CRLF = "its line ends were turned into CRLF (core.autocrlf); its text is right"


@dataclass(frozen=True)
class Edition:
    """A patch: its name, verl, place, bytes and sections, and the files before it, if known."""

    name: str
    base: str | None
    place: Path | None
    patch: bytes
    files: dict[str, FilePatch]
    before: dict[str, bytes | None] = field(default_factory=dict)


def load(folder: Path) -> list[Edition]:
    """Return the patches of the folder, each verified by the manifest."""
    try:
        manifest, editions = json.loads(read_regular(folder / "manifest.json", 2**16)), []
        for entry in manifest["patches"] or [{}]:
            patch = read_regular(place := folder / entry["name"], MAX_BYTES)
            if sha256_hex(patch) != entry["sha256"]:
                raise ValueError(f"{entry['name']} has the sha256 {sha256_hex(patch)}, not {entry['sha256']}")
            name, base = f"{manifest['version']} for verl {entry['base']}", entry["base"].removeprefix("v")
            editions.append(Edition(name, base, place, patch, parse(patch)))
        return editions
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal("patches-broken", folder=folder, found=str(error)[:200]) from error


@dataclass
class Survey:
    """The state of a checkout relative to a patch; ``other`` names another patch on the tree.

    ``sides`` has each file's contents before and after the patch, ``strangers`` the files that are neither and why,
    ``unpatched`` the files before the patch, ``lacking`` the missing ones; ``state`` is the first of ``STATES`` that
    holds.
    """

    checkout: Checkout
    edition: Edition
    files: dict[str, FileState]
    other: str | None = None

    def __post_init__(self) -> None:
        known = {path: [self.edition.before[path]] if path in self.edition.before else [] for path in self.files}
        parts, there = self.edition.files, self.files
        self.sides = {p: None if there[p].obstacle else parts[p].sides(there[p].content, *known[p]) for p in parts}
        self.strangers = {path: self._why(path, there[path]) for path, both in self.sides.items() if both is None}
        self.unpatched = [path for path, both in self.sides.items() if both and there[path].content == both[0]]
        self.lacking = [path for path in self.strangers if there[path].content is None]
        self.is_base = self.edition.base in (None, self.checkout.version.removesuffix(".dev"))
        self.state = next(state for state in STATES if state.holds(self))

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


class State(NamedTuple):
    """A state that a tree may be in."""

    name: str
    refusal: str
    """Name of its refusal; empty where the patch can be applied or removed."""
    holds: Callable[[Survey], object]


STATES = (
    State("OTHER_VERSION", "state-other-patch", lambda t: t.other),
    State("OTHER_VERSION", "state-older", lambda t: (t.checkout.root / "verl/gradloc").is_dir()),
    State("APPLIED", "", lambda t: not t.strangers and not t.unpatched),
    State("PRISTINE", "", lambda t: not t.strangers and len(t.unpatched) == len(t.files)),
    State("PARTIAL", "state-partial", lambda t: not t.strangers),
    State("DRIFTED", "state-published", lambda t: any(found.blob == PUBLISHED_ACTOR for found in t.files.values())),
    State("WRONG_BASE", "state-wrong-base", lambda t: not t.is_base),
    State("DRIFTED", "state-crlf", lambda t: {*t.strangers.values()} == {CRLF}),
    State("DRIFTED", "state-blocked", lambda t: t.files[next(iter(t.strangers))].obstacle),
    State("DRIFTED", "state-edited", lambda t: t.edition.before),
    State("DRIFTED", "state-forked", lambda t: t.edition.place and t.checkout.kind == "clone" and not t.lacking),
    State("DRIFTED", "state-drifted", lambda t: True),
)
"""The first one that holds is the tree's."""


def diagnose(tree: Survey) -> Refusal:
    """Make the refusal of a tree that the patch can be neither applied to nor removed from."""
    state, root, why = tree.state, tree.checkout.root, tree.strangers
    names = [*(why or tree.unpatched or tree.files)]
    words: dict[str, Any] = {"n": len(names), "all": len(tree.files), "first": names[0], "names": " ".join(names)}
    words |= {"version": tree.checkout.version, "base": tree.edition.base, "command": tree.checkout.command}
    words |= {"root": root, "place": root / names[0], "patch": tree.edition.place, "other": tree.other}
    words |= {"lines": [f"{path}: {one}" for path, one in why.items()], "files": _listed(why), "state": state.name}
    if state.name == "PARTIAL":
        words["lines"] = [f"not patched: {path}" for path in names]
    if why:
        ids = tree.edition.files[names[0]].before, tree.files[names[0]].blob
        words["expected"], words["found"] = (f"git blob {one[:12]}" if one else "no file" for one in ids)
    return Refusal(state.refusal, why=why.get(names[0]), **words)


def _listed(why: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "why": one} for path, one in why.items()]


def survey(checkout: Checkout, editions: list[Edition], is_wanted: bool) -> Survey:
    """Return the state of the checkout relative to the edition that fits best, after undoing an interrupted run.

    If another patch is applied, that one is measured, or named, if it ``is_wanted``.
    """
    root = checkout.root
    back = {path: FileState(now) for path, (now, _) in trees.interrupted(root).items()}
    patch, before = trees.remembered(root)

    def measured(edition: Edition) -> Survey:
        edition = replace(edition, before=before) if edition.patch == patch else edition
        return Survey(checkout, edition, {path: back.get(path) or read_plain(root, path) for path in edition.files})

    best = min(map(measured, editions), key=lambda one: (bool(one.strangers), not one.is_base, len(one.strangers)))
    if patch and all(patch != edition.patch for edition in editions) and best.state.name != "APPLIED":
        there = measured(Edition(f"sha256 {sha256_hex(patch)[:12]}", None, None, patch, parse(patch)))
        if len(there.unpatched) + len(there.strangers) < len(there.files):  # else it was removed by other means
            return replace(best, other=there.edition.name) if is_wanted else there
    return best


def plan(tree: Survey, reverse: bool, force: bool) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Return the changes that lead to the patch, or back; refuse a state that they must not start from."""
    if tree.state.refusal and not (tree.state.name == "PARTIAL" and force):
        raise diagnose(tree)
    goals = {path: known[not reverse] for path, known in sorted(tree.sides.items()) if known}
    changes = {p: (tree.files[p].content, goal) for p, goal in goals.items() if tree.files[p].content != goal}
    if changes and not force and (unfinished := tree.checkout.unfinished()):
        raise Refusal("git-unfinished", mark=unfinished)
    trees.preflight(tree.checkout.root, changes)
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
    example = f"example:\n  {program()} --repo VERL --check"
    parser = Parser(prog=program(), description=__doc__, epilog=example, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, about in OPTIONS.items():
        parser.add_argument(name, **about | ({} if len(about) > 1 else {"action": "store_true"}))
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(parser, parser.parse_args(given)), given)


def _run(parser: Parser, options: argparse.Namespace) -> int:
    pairs = (("repo", "target"), ("patch_file", "patch_url"), ("sha256_file", "sha256"))
    targets, named, sums = ([x for x in (getattr(options, n) for n in pair) if x is not None] for pair in pairs)
    if len(targets) + options.installed != 1:
        parser.error(f"exactly one target is needed, and {len(targets) + options.installed} were named")
    if options.status and (options.check or options.reverse):
        parser.error("--status does not go with --check or --reverse")
    if len(named) > 1 or len(sums) > len(named) or "://" not in (options.patch_url or "://"):
        parser.error("a patch is one --patch-file F or one --patch-url URL, its sum one --sha256-file or one --sha256")
    editions, changes, note = load(options.patches), dict[str, Any](), ""
    checkout = resolve(str(installed_root()) if options.installed else targets[0], options.installed)
    if named:
        patch = fetch_patch(named[0], options.sha256_file, options.sha256, [sha256_hex(e.patch) for e in editions])
        foreign = Edition(f"{named[0]}, sha256 {sha256_hex(patch)[:12]}", None, None, patch, parse(patch))
        editions = [one for one in editions if one.patch == patch] or [foreign]
    root, only_looks = checkout.root, options.status or options.check
    with contextlib.nullcontext() if only_looks else trees.locked(root, options.wait):
        if only_looks and trees.interrupted(root):
            note = "a run was interrupted here: the next one first puts back what it changed"
        elif not only_looks and trees.recover(root):
            note = "put back what an interrupted run had changed"
        tree = survey(checkout, editions, bool(named) or not (options.status or options.reverse))
        if not options.status:
            changes = plan(tree, options.reverse, options.force)
        if changes and not options.check:
            trees.swap(root, changes, None if options.reverse else tree.edition.patch)
            tree = survey(checkout, [tree.edition], True)
    _print(tree, [*changes], note, options)
    return int(options.status and bool(tree.state.refusal))


def _print(tree: Survey, files: list[str], note: str, options: argparse.Namespace) -> None:
    verb, state = "take off" if options.reverse else "apply", tree.state.name
    done = f"would {verb}" if options.check else "taken off" if options.reverse else "applied"
    did = f"{done}: {len(files)} files" if files else f"nothing to {verb}"
    if options.json:
        result = {"exit_code": int(options.status and bool(tree.state.refusal)), "state": state, "did": did}
        result |= {"patch": tree.edition.name, "notes": [note] if note else [], "changed": files}
        result["files"] = _listed(tree.strangers)
        return say(json.dumps(result, indent=1))
    about = [f"target:   {tree.checkout.root} ({tree.checkout.kind} of verl {tree.checkout.version})"]
    about += [f"patch:    {tree.edition.name}"]
    about += capped([f"{path}: {why}" for path, why in tree.strangers.items()] or files)
    about += [f"note:     {note}"] if note else []
    if state == "APPLIED" and tree.edition.base:
        about += ["next:     pip install . in the clone of GradLoc, on every node, if it is not there yet"]
    if options.status or not options.quiet:
        say("\n  ".join([state if options.status else did, *([] if options.quiet else about)]))


if __name__ == "__main__":
    sys.exit(main())
