# SPDX-License-Identifier: Apache-2.0
"""Builds patches/ from gradloc/ and verl_overrides/, after taking a checkout's edits into them if one is named.

Edits flow one way at a time: edit and run in a patched checkout, then take the edits back with --repo. Without --repo,
patches/ is built from the sources as they are.
"""

import argparse
import difflib
import os
import sys
from pathlib import Path

from ..apply.applier import KEPT_PATCH
from ..apply.library import HISTORY_NAME
from ..command import Parser, guarded, say
from ..errors import CheckoutStateError, IntegrityError, UsageError, capped, program, quoted
from ..patch.content import blob_id, sha256_hex
from ..patch.edition import Edition, remember
from ..patch.language import parse
from ..patch.manifest import Base
from ..tree.checkout import Checkout, resolve
from ..tree.filesystem import Filesystem
from ..tree.lock import locked
from . import base as bases
from . import drift, generated
from .snapshot import Edits, descends, edits_of_archive, edits_of_clone, resolve_commit
from .sources import Folders, check_fits, compose
from .take import merge, origin, sources_of

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    made = Parser(prog="make_patch.sh", description=__doc__, allow_abbrev=False)
    add = made.add_argument
    add("--repo", metavar="CHECKOUT", help="take the edits of this checkout")
    add("--base", metavar="REV", help="the commit or tag that the edits start from (default: the pinned one it is on)")
    add("--head", metavar="REV", help="take a commit's content (default: the working tree)")
    add(
        "--output", type=Path, metavar="FILE", help="write a patch of the checkout here and leave this repository alone"
    )
    add("--check", action="store_true", help="write nothing; fail if patches/ is not what would be built")
    add(
        "--refresh-generated",
        action="store_true",
        help="write the checkout's _generated_*.yaml anew before taking its edits",
    )
    add("--drift", metavar="VERL", help="say which seams still fit a verl tree and which lines moved; write nothing")
    add(
        "--remember",
        type=Path,
        metavar="PATCH",
        help="add a released patch to the history, so that trees that have it are known",
    )
    add("--debug", action="store_true", help="show a traceback on an error")
    add("--package", type=Path, default=ROOT / "gradloc", help=argparse.SUPPRESS)
    add("--overrides", type=Path, default=ROOT / "verl_overrides", help=argparse.SUPPRESS)
    add("--patches", type=Path, default=ROOT / "patches", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        options = parser().parse_args(given)
        folder = options.package.resolve().parent / ".gradloc"
        folder.mkdir(exist_ok=True)
        with locked(Filesystem(), folder / "make_patch", hide=False):
            _run(options, Folders(options.package, options.overrides))
        return 0

    return guarded(run, "--debug" in given)


def _run(options: argparse.Namespace, folders: Folders) -> None:
    if options.check + bool(options.repo) + bool(options.drift) + bool(options.remember) > 1:
        what, cause = "--check, --repo, --drift and --remember do not go together", "Each is a command of its own."
        raise UsageError("take-one-command", what, cause, "bash make_patch.sh --check")
    if not options.repo and (options.head or options.output or (options.base and not options.drift)):
        what, cause = "--base, --head and --output need --repo", "They say what to take from a checkout."
        raise UsageError("take-needs-repo", what, cause, "bash make_patch.sh --repo CHECKOUT ...")
    trees = {base: bases.ensure_base(base.tag) for base in folders.bases(list(bases.PINNED))}
    if options.check:
        check(compose(folders, trees), options.patches)
        say("patches/ is what its sources build")
    elif options.drift:
        _drift(folders, trees, resolve(options.drift, allow_installed=True).root, options.base)
    else:
        if options.remember:
            _remember(folders, trees, options.remember)
        elif options.repo and _take(options, folders, trees):
            return
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
            old, new = (text.decode("utf-8", "replace").splitlines() for text in (found, data))
            diff = difflib.unified_diff(
                old, new, f"patches/{name}", f"built from the sources: {name}", lineterm="", n=1
            )
            what, cause = f"patches/{name} is not what its sources build", "One was edited and the other not rebuilt."
            raise IntegrityError("build-stale", what, cause, "bash make_patch.sh", diff=diff)
    for path in sorted(patches.rglob("*")):
        if path not in {patches / name for name in expected} and not path.is_dir():
            what = f"patches/{path.relative_to(patches).as_posix()} is a file that the manifest does not name"
            raise IntegrityError(
                "build-unlisted", what, "It was put there by hand; patches/ is generated.", "Remove it."
            )


def _drift(folders: Folders, trees: dict[Base, Path], root: Path, tag: str | None) -> None:
    for base, tree in trees.items():
        if tag not in (None, base.tag):
            continue
        seams = sorted(folders.read(base.tag, tree).seams.items())
        rows = [(path, *drift.judge(parse(text.encode())[0], root / path)) for path, text in seams]
        kinds = [kind for _, kind, _ in rows]
        counts = (f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        say(f"the {len(rows)} seams of {base.tag} on {root}: {', '.join(counts)}")
        width = max(len(path) for path, _, _ in rows)
        say("\n".join(f"  {path:<{width}}  {kind:<8}  {where}".rstrip() for path, kind, where in rows))


def _remember(folders: Folders, trees: dict[Base, Path], path: Path) -> None:
    """Adds a released patch, whose preamble says which version it is, to ``verl_overrides/history.json``."""
    data = path.read_bytes()
    version = data.split(b"\n", 1)[0].decode("utf-8", "replace").rpartition(" ")[2]
    for base, tree in trees.items():
        if f"Applies-To: verl {base.tag},".encode() in data:
            check_fits(data, tree)
            history = folders.overrides / HISTORY_NAME
            known = history.read_bytes() if history.is_file() else b""
            write_file(history, remember(Edition.of(data, version, base.tag), known))
            say(f"remembered: {version} for verl {base.tag}")


def _take(options: argparse.Namespace, folders: Folders, trees: dict[Base, Path]) -> bool:
    """Takes a checkout's edits into the sources; True if they were written elsewhere, to ``--output``."""
    checkout = resolve(options.repo, allow_installed=True)
    if options.refresh_generated:
        for path in generated.refresh(checkout.root):
            say(f"refreshed: {path}")
    base = _base_of(checkout, options, trees)
    if checkout.git_dir is not None:
        edits = edits_of_clone(checkout.root, base.commit, options.head)
    elif options.head or options.base not in (None, base.tag, base.commit):
        what, cause = f"{checkout.root} is no clone, so it has no commits", "--base and --head name commits."
        raise UsageError("take-needs-git", what, cause, "Leave them out: the files as they are will be taken.")
    else:
        edits = edits_of_archive(checkout.root, trees[base])
    if options.head is None and any(map(generated.is_source, edits.contents)):
        if generated.can_check():
            generated.check(checkout.root)
        else:
            say("note: whether _generated_*.yaml are fresh was not checked: no hydra here (PYTHON=... names one)")
    if not edits.contents:
        what, cause = f"{checkout.root} has no edits under verl/ since the base", "It was never patched or edited."
        next_ = f"{program()} --repo {quoted(checkout.root)}   (then edit, then run this again)"
        raise CheckoutStateError("take-nothing", what, cause, next_)
    if options.output:
        data = sources_of(edits).patch(base)
        write_file(options.output, data)
        sums = options.output.with_name(options.output.name + ".sha256")
        write_file(sums, f"{sha256_hex(data)}  {options.output.name}\n".encode())
        say(f"written: {options.output} ({len(data)} bytes), {sums.name}")
        return True
    if base not in trees:
        what, cause = (
            "the sources are for the pinned verls only",
            "A patch for another commit cannot be built from them.",
        )
        next_, pinned = "Add --output FILE to write such a patch elsewhere.", ", ".join(one.tag for one in trees)
        raise UsageError("take-other-base", what, cause, next_, expected=pinned, found=base.commit)
    _merge(checkout, base, edits, folders, trees[base], options.patches)
    return False


def _base_of(checkout: Checkout, options: argparse.Namespace, trees: dict[Base, Path]) -> Base:
    """The verl that the edits start from: the one that is named, else the latest pinned one that the checkout is on."""
    named = [base for base in trees if options.base in (base.tag, base.commit)]
    if named:
        return named[0]
    if checkout.git_dir is None:
        return next((base for base in trees if base.is_said_by(checkout.version)), next(iter(trees)))
    if options.base:
        commit = resolve_commit(checkout.root, options.base)
        return next(
            (base for base in trees if base.commit == commit), Base("of another commit", commit or options.base)
        )
    on = (base for base in reversed(trees) if descends(checkout.root, base.commit, options.head or "HEAD"))
    return next(on, next(iter(trees)))


def _merge(checkout: Checkout, base: Base, edits: Edits, folders: Folders, tree: Path, patches: Path) -> None:
    """Takes the edits into the sources; everything is composed before anything is written."""
    theirs, ours = sources_of(edits), folders.read(base.tag, tree)
    merged = merge(ours, theirs, origin(checkout, patches))
    check_fits(merged.sources.patch(base), tree)
    for path in (*merged.taken, *merged.removed):
        blob = blob_id((tree / path).read_bytes()) if (tree / path).is_file() else None
        text = merged.sources.seams.get(path) if blob else merged.sources.new_files.get(path)
        place = folders.place(base.tag, path, blob)
        if text is None:
            place.unlink(missing_ok=True)
        else:
            write_file(place, text.encode())
    # From now on this is what the checkout and the sources last agreed on; and the applier knows the checkout by it.
    with locked(Filesystem(), checkout.state_folder, hide=checkout.git_dir is None):
        write_file(checkout.state_folder / KEPT_PATCH, theirs.patch(base))
    for label, paths in (
        ("taken", merged.taken),
        ("removed", merged.removed),
        ("kept, newer in the sources", merged.kept),
        ("left out, ignored by git or outside verl/", edits.left_out),
    ):
        for path in capped(paths):
            say(f"{label}: {path}")
    if not (merged.taken or merged.removed):
        say("nothing to take: the checkout has no edits that the sources lack")


if __name__ == "__main__":
    sys.exit(main())
