# SPDX-License-Identifier: Apache-2.0
"""Builds patches/ from gradloc/ and verl_overrides/, after taking a checkout's edits into it if one is named.

Edits flow one way at a time: edit and run in a patched checkout, then take the edits back with
--repo. Without --repo, patches/ is built from the sources as they are.
"""

import argparse
import sys
from pathlib import Path

from .. import BASE_COMMIT
from ..apply.applier import KEPT_PATCH
from ..command import guarded, say
from ..errors import CheckoutStateError, UsageError
from ..patch.digest import sha256_hex
from ..patch.language import FilePatch, parse
from ..tree.checkout import Checkout, resolve
from ..tree.filesystem import Filesystem
from ..tree.lock import locked
from .base import ensure_base
from .compose import BASE_TAG, PATCH_NAME, Folders, compose, compose_patch, read_sources
from .generated import can_check, is_source, refresh
from .generated import check as check_generated
from .snapshot import Edits, edits_of_archive, edits_of_clone, resolve_commit
from .take import Merge, merge, sources_of
from .write import build, check, write_file

ROOT = Path(__file__).resolve().parents[2]
MAX_LISTED = 30


def read_edits(options: argparse.Namespace) -> tuple[Edits, Path]:
    """Returns the edits of the checkout that the options name, and its root."""
    checkout = resolve(options.repo, allow_installed=True)
    root = checkout.root
    if checkout.git_dir is not None:
        edits = edits_of_clone(root, options.base, options.head)
    elif options.head or options.base != BASE_COMMIT:
        raise UsageError("take-needs-git", target=root)
    else:
        edits = edits_of_archive(root, ensure_base())
    if options.head is None and any(is_source(path) for path in edits.contents):
        _check_generated(root)
    return edits, root


def _check_generated(root: Path) -> None:
    if can_check():
        check_generated(root)
    else:
        say(
            "note: whether _generated_*.yaml are fresh was not checked: no hydra here "
            "(PYTHON=... bash make_patch.sh names a Python that has it)"
        )


def export(edits: Edits, output: Path) -> None:
    """Writes a patch of the edits to ``output``, and its checksum beside it."""
    data = compose_patch(sources_of(edits))
    write_file(output, data)
    sums = output.with_name(output.name + ".sha256")
    write_file(sums, f"{sha256_hex(data)}  {output.name}\n".encode())
    say(f"written: {output} ({len(data)} bytes), {sums.name}")


def take(edits: Edits, root: Path, folders: Folders, patches: Path) -> Merge:
    """Takes the edits into ``folders``; everything is composed before anything is written."""
    checkout = resolve(str(root), allow_installed=True)
    theirs = sources_of(edits)
    merged = merge(read_sources(folders), theirs, _given(checkout, patches))
    compose(merged.sources, ensure_base(), patches / "older")
    _write_sources(merged, folders)
    # From now on this is what the checkout and the sources last agreed on; and the applier
    # knows the checkout by it.
    with locked(Filesystem(), checkout.state_folder, hide=checkout.git_dir is None):
        write_file(checkout.state_folder / KEPT_PATCH, compose_patch(theirs))
    for label, paths in (
        ("taken", merged.taken),
        ("removed", merged.removed),
        ("kept, newer in the sources", merged.kept),
        ("left out, ignored by git or outside verl/", edits.left_out),
    ):
        for path in paths[:MAX_LISTED]:
            say(f"{label}: {path}")
        if len(paths) > MAX_LISTED:
            say(f"{label}: {len(paths) - MAX_LISTED} more")
    if not (merged.taken or merged.removed):
        say("nothing to take: the checkout has no edits that the sources lack")
    return merged


def _given(checkout: Checkout, patches: Path) -> tuple[FilePatch, ...]:
    """The patch that the checkout was given, or had when edits were last taken; else the built."""
    for path in (checkout.state_folder / KEPT_PATCH, patches / PATCH_NAME):
        if path.is_file():
            return parse(path.read_bytes())
    return ()


def _write_sources(merged: Merge, folders: Folders) -> None:
    for path in (*merged.taken, *merged.removed):
        places = (
            (folders.place(path), merged.sources.new_files),
            (folders.seam(path), merged.sources.seams),
        )
        for place, texts in places:
            if path in texts:
                write_file(place, texts[path].encode())
            else:
                place.unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    made = argparse.ArgumentParser(prog="make_patch.sh", description=__doc__)
    made.add_argument("--repo", metavar="CHECKOUT", help="take the edits of this checkout")
    made.add_argument(
        "--base",
        default=BASE_COMMIT,
        metavar="REV",
        help="the commit that the edits start from (default: the pinned one)",
    )
    made.add_argument("--head", metavar="REV", help="take a commit's content (default: the working tree)")
    made.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a patch of the checkout here and leave this repository alone",
    )
    made.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if patches/ is not what would be built",
    )
    made.add_argument(
        "--refresh-generated",
        action="store_true",
        help="write the checkout's _generated_*.yaml anew before taking its edits",
    )
    made.add_argument("--package", type=Path, default=ROOT / "gradloc", help=argparse.SUPPRESS)
    overrides = ROOT / "verl_overrides" / BASE_TAG
    made.add_argument("--overrides", type=Path, default=overrides, help=argparse.SUPPRESS)
    made.add_argument("--patches", type=Path, default=ROOT / "patches", help=argparse.SUPPRESS)
    made.add_argument("--debug", action="store_true", help="show a traceback on an error")
    return made


def _run(options: argparse.Namespace) -> None:
    if options.check and options.repo:
        raise UsageError("take-check-repo")
    if options.check:
        check(Folders(options.package, options.overrides), options.patches, ensure_base())
        say("patches/ is what its sources build")
        return
    if options.repo is None:
        if options.head or options.output or options.base != BASE_COMMIT:
            raise UsageError("take-needs-repo")
    else:
        if options.refresh_generated:
            for path in refresh(resolve(options.repo, allow_installed=True).root):
                say(f"refreshed: {path}")
        edits, root = read_edits(options)
        if not edits.contents:
            raise CheckoutStateError("take-nothing", target=root)
        if options.output:
            export(edits, options.output)
            return
        if options.base != BASE_COMMIT and resolve_commit(root, options.base) != BASE_COMMIT:
            raise UsageError("take-other-base", expected=BASE_COMMIT, found=options.base)
        take(edits, root, Folders(options.package, options.overrides), options.patches)
    written = build(Folders(options.package, options.overrides), options.patches, ensure_base())
    say(f"built: {', '.join(written)}" if written else "patches/ is unchanged")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    folder = options.package.resolve().parent / ".gradloc"

    def run() -> int:
        folder.mkdir(exist_ok=True)
        with locked(Filesystem(), folder / "make_patch", hide=False):
            _run(options)
        return 0

    return guarded(run, options.debug, target=options.repo or "CHECKOUT")


if __name__ == "__main__":
    sys.exit(main())
