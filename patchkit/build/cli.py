# SPDX-License-Identifier: Apache-2.0
"""Builds patches/ from gradloc/ and verl_overrides/, after taking a checkout's edits into them if one is named.

Edits flow one way at a time: edit and run in a patched checkout, then take the edits back with --repo. Without --repo,
patches/ is built from the sources as they are.
"""

import argparse
import difflib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ..apply.library import RELEASED
from ..command import Parser, guarded, say
from ..errors import CheckoutStateError, IntegrityError, capped, program, quoted
from ..patch.content import blob_id, sha256_hex
from ..patch.language import forward, parse
from ..patch.manifest import Base, remembered
from ..tree.checkout import Checkout, resolve
from ..tree.disk import Filesystem, locked
from ..tree.transaction import KEPT_PATCH
from . import base as bases
from . import generated, seams
from .seams import seam
from .sources import Folders, Sources, check_fits, compose, unstamped
from .take import descends, edits_of_archive, edits_of_clone, merge, origin, resolve_commit, sources_of

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    made = Parser(prog="make_patch.sh", description=__doc__, allow_abbrev=False)
    add = made.add_argument
    command = made.add_mutually_exclusive_group()
    command.add_argument("--repo", metavar="CHECKOUT", help="take the edits of this checkout")
    command.add_argument("--check", action="store_true", help="write nothing; fail if patches/ is not what it would be")
    command.add_argument("--drift", metavar="VERL", help="say which seams still fit a verl tree; write nothing")
    command.add_argument("--remember", type=Path, metavar="PATCH", help="keep a released patch known")
    add("--base", metavar="REV", help="the commit or tag that the edits start from (default: the pinned one it is on)")
    add("--head", metavar="REV", help="take a commit's content (default: the working tree)")
    add("--output", type=Path, metavar="FILE", help="write a patch of the checkout here, and change nothing else")
    anew = "write _generated_*.yaml anew first: the checkout's, or without --repo each verl's"
    add("--refresh-generated", action="store_true", help=anew)
    add("--debug", action="store_true", help="show a traceback on an error")
    add("--package", type=Path, default=ROOT / "gradloc", help=argparse.SUPPRESS)
    add("--overrides", type=Path, default=ROOT / "verl_overrides", help=argparse.SUPPRESS)
    add("--patches", type=Path, default=ROOT / "patches", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> None:
        options = parser().parse_args(given)
        folder = options.package.resolve().parent / ".gradloc"
        folder.mkdir(exist_ok=True)
        with locked(Filesystem(), folder / "make_patch", hide=False):
            _run(options, Folders(options.package, options.overrides))

    return guarded(run, "--debug" in given)


def _run(options: argparse.Namespace, folders: Folders) -> None:
    if not options.repo and (options.head or options.output or (options.base and not options.drift)):
        parser().error("--base, --head and --output need --repo: they say what to take from a checkout")
    has_sources = (base for base in bases.PINNED if (folders.overrides / base.tag).is_dir())
    trees = {base: bases.ensure_base(base.tag) for base in has_sources}
    if options.check:
        check(compose(folders, trees), options.patches)
        say("patches/ is what its sources build")
    elif options.drift:
        _drift(folders, trees, resolve(options.drift, allow_installed=True).root, options.base)
    elif not (options.repo and _take(options, folders, trees)):
        if options.remember:
            _remember(options.patches, trees, options.remember)
        for base, tree in trees.items() if options.refresh_generated and not options.repo else ():
            _refresh(folders, base, tree)
        written = [name for name, data in compose(folders, trees).items() if write_file(options.patches / name, data)]
        say(f"built: {', '.join(written)}" if written else "patches/ is unchanged")


def write_file(path: Path, data: bytes) -> bool:
    """Writes ``data`` to ``path``, whole or not at all; False if it holds that already."""
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
    return True


def check(expected: dict[str, bytes], patches: Path) -> None:
    """Raises IntegrityError unless the folder ``patches`` is, byte for byte, what a build would write."""
    for name, data in expected.items():
        found = (patches / name).read_bytes() if (patches / name).is_file() else b""
        if found != data:
            before, after = (text.decode("utf-8", "replace").splitlines() for text in (found, data))
            diff = list(difflib.unified_diff(before, after, f"patches/{name}", f"built: {name}", lineterm="", n=1))
            what, cause = f"patches/{name} is not what its sources build", "One was edited and the other not rebuilt."
            raise IntegrityError("build-stale", what, cause, "bash make_patch.sh", diff=diff)
    built = {patches / name for name in expected}
    for path in sorted(patches.rglob("*")):
        if path not in built and path.parent != patches / RELEASED and not path.is_dir():
            what = f"patches/{path.relative_to(patches).as_posix()} is a file that the manifest does not name"
            cause = "It was put there by hand."
            raise IntegrityError("build-unlisted", what, cause, "Remove it: patches/ is generated.")


def _drift(folders: Folders, trees: dict[Base, Path], root: Path, tag: str | None) -> None:
    for base in (base for base in trees if tag in (None, base.tag)):
        listed = sorted(folders.read(base.tag, trees[base]).seams.items())
        rows = [(path, *seams.judge(parse(text.encode())[0], root / path)) for path, text in listed]
        kinds = [kind for _, kind, _ in rows]
        counts = (f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        say(f"the {len(rows)} seams of {base.tag} on {root}: {', '.join(counts)}")
        width = max(len(path) for path, _, _ in rows)
        say("\n".join(f"  {path:<{width}}  {kind:<8}  {where}".rstrip() for path, kind, where in rows))


def _remember(patches: Path, trees: dict[Base, Path], path: Path) -> None:
    """Adds a released patch, whose preamble says which version it is, to ``patches/released/``."""
    data = path.read_bytes()
    version = data.split(b"\n", 1)[0].decode("utf-8", "replace").rpartition(" ")[2]
    for base in (base for base in trees if f"Applies-To: verl {base.tag},".encode() in data):
        check_fits(data, trees[base])
        place = patches / RELEASED / f"gradloc-{version}-for-{base.tag}.patch"
        write_file(place, remembered(data, version, base.tag))
        say(f"remembered: {version} for verl {base.tag}")


def _refresh(folders: Folders, base: Base, tree: Path) -> None:
    """Makes the seams of verl's generated files anew, from what the other sources make of a copy of ``tree``."""
    sources = folders.read(base.tag, tree)
    others = {path: text for path, text in sources.seams.items() if "_generated_" not in path}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(shutil.copytree(tree, Path(scratch) / "verl"))
        for file in parse(Sources(sources.new_files, others).patch(base)):
            write_file(root / file.path, forward(file, (tree / file.path).read_bytes() if file.before else b""))
        for name in generated.SPECS:
            path = f"{generated.CONFIG}/{name}"
            before, after = (tree / path).read_bytes(), generated.generate(root, name)
            if seam(path, before, after) != sources.seams.get(path):
                write_file(folders.place(base.tag, path, blob_id(before)), seam(path, before, after).encode())
                say(f"refreshed: {path} of {base.tag}")


def _take(options: argparse.Namespace, folders: Folders, trees: dict[Base, Path]) -> bool:
    """Takes a checkout's edits into the sources; True if they were written elsewhere, to ``--output``."""
    checkout = resolve(options.repo, allow_installed=True)
    root, base = checkout.root, _base_of(checkout, options, trees)
    for path, data in generated.stale(root).items() if options.refresh_generated else ():
        write_file(root / path, data)
        say(f"refreshed: {path}")
    # a tree in the user's own git history has no commit of verl's: then the base is its package, as without git
    is_clone = checkout.git_dir is not None and (resolve_commit(root, base.commit) or base not in trees)
    if is_clone:
        edits = edits_of_clone(root, base.commit, options.head)
    elif options.head or options.base not in (None, base.tag, base.commit):
        parser().error(f"{root} has no commits of verl's, so there are none for --base and --head to name")
    else:
        edits = edits_of_archive(root, trees[base])
    if options.head is None and any(path.startswith(generated.CONFIG) for path in edits.contents):
        if generated.can_check():
            generated.check(root)
        else:
            say("note: whether _generated_*.yaml are fresh was not checked: no hydra here (PYTHON=... names one)")
    if not edits.contents:
        what, cause = f"{root} has no edits under verl/ since the base", "It was never patched or edited."
        next_ = f"{program()} --repo {quoted(root)}   (then edit, then run this again)"
        raise CheckoutStateError("take-nothing", what, cause, next_)
    theirs = sources_of(edits)
    if options.output:
        data = theirs.patch(base)
        write_file(options.output, data)
        sums = options.output.with_name(options.output.name + ".sha256")
        write_file(sums, f"{sha256_hex(data)}  {options.output.name}\n".encode())
        say(f"written: {options.output} ({len(data)} bytes), {sums.name}")
        return True
    if base not in trees:
        parser().error("the sources are for the pinned verls only; --output FILE writes a patch for another commit")
    _merge(checkout, base, theirs, folders, trees[base], options.patches)
    for path in capped(edits.left_out):
        say(f"left out, ignored by git or outside verl/: {path}")
    return False


def _base_of(checkout: Checkout, options: argparse.Namespace, trees: dict[Base, Path]) -> Base:
    """The verl that the edits start from: the one that is named, else the latest pinned one that the checkout is on."""
    named = next((base for base in trees if options.base in (base.tag, base.commit)), None)
    if named or checkout.git_dir is None:
        return named or next((base for base in trees if base.is_said_by(checkout.version)), next(iter(trees)))
    if options.base:
        commit = resolve_commit(checkout.root, options.base) or options.base
        return next((base for base in trees if base.commit == commit), Base("of another commit", commit))
    on = (base for base in reversed(trees) if descends(checkout.root, base.commit, options.head or "HEAD"))
    return next(on, next(iter(trees)))


def _merge(checkout: Checkout, base: Base, theirs: Sources, folders: Folders, tree: Path, patches: Path) -> None:
    """Takes the edits into the sources; everything is composed before anything is written."""
    merged, taken, removed, kept = merge(folders.read(base.tag, tree), theirs, origin(checkout, patches))
    check_fits(merged.patch(base), tree)
    for path in (*taken, *removed):
        blob = blob_id((tree / path).read_bytes()) if (tree / path).is_file() else None
        text = merged.seams.get(path) if blob else merged.new_files.get(path)
        place = folders.place(base.tag, path, blob)
        if text is None:
            place.unlink(missing_ok=True)
        else:
            write_file(place, unstamped(path, text).encode())
    # From now on this is what the checkout and the sources last agreed on; and the applier knows the checkout by it.
    with locked(Filesystem(), checkout.state_folder, hide=checkout.git_dir is None):
        write_file(checkout.state_folder / KEPT_PATCH, theirs.patch(base))
    lists = {"taken": taken, "removed": removed, "kept, newer in the sources": kept}
    for label, path in ((label, path) for label, paths in lists.items() for path in capped(paths)):
        say(f"{label}: {path}")
    if not (taken or removed):
        say("nothing to take: the checkout has no edits that the sources lack")
