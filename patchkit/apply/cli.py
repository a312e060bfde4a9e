# SPDX-License-Identifier: Apache-2.0
"""Puts GradLoc on a verl checkout, or takes it off again.

Nothing is changed unless the content of every file that the patch touches is known, and then all
of it or nothing. Exit codes: 0 done, or already so; 1 refused because of the checkout's state;
2 wrong usage; 3 the patch or its checksum is not what it should be; 4 the disk failed, everything
was put back; 5 the disk failed, run again to finish; 6 another run is at work; 7 the network.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ..command import guarded, say, say_json
from ..errors import UsageError, program
from ..tree.checkout import Checkout, installed_root, resolve
from .applier import Applier, Report
from .library import Library
from .source import named_patch

PATCHES = Path(__file__).resolve().parents[2] / "patches"


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    made = argparse.ArgumentParser(
        prog=program().split()[-1],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example: {program()} --repo ~/src/verl --check",
        allow_abbrev=False,
    )
    made.add_argument("target", nargs="?", metavar="VERL", help="the same as --repo VERL")
    made.add_argument("--repo", metavar="VERL", help="the top folder of a verl tree")
    made.add_argument("--installed", action="store_true", help="the verl package of the Python that runs this")
    mode = made.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="predict everything, change nothing")
    mode.add_argument("--status", action="store_true", help="say which state the checkout is in")
    mode.add_argument("--reverse", action="store_true", help="take the patch off again")
    mode.add_argument("--list", action="store_true", help="list the known versions of the patch")
    source = made.add_mutually_exclusive_group()
    source.add_argument("--patch-file", metavar="FILE", help="a patch other than the built one")
    source.add_argument("--patch-url", metavar="URL", help="a patch to download (https)")
    source.add_argument("--patch-version", metavar="V", help="a version that --list names")
    made.add_argument("--patch-sha256", metavar="HEX", help="what the patch's sha256 must be")
    made.add_argument("--sha256-file", metavar="FILE|URL", help="a list with the patch's sha256")
    made.add_argument(
        "--force",
        action="store_true",
        help="skip the checks for a half patched tree and for unfinished git "
        "operations; never overwrites a file whose content is not known",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--quiet", action="store_true", help="print errors only (with --status: the state alone)")
    made.add_argument("--debug", action="store_true", help="show a traceback on an error")
    made.add_argument("--patches", type=Path, default=PATCHES, help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parser().parse_args(arguments)
    target = options.repo or options.target or "VERL"
    return guarded(lambda: _run(options), options.debug, options.json, target)


def _run(options: argparse.Namespace) -> int:
    library = Library(options.patches)
    if options.list:
        _list(library, options)
        return 0
    notes = _choose_patch(library, options)
    checkout = _checkout(options)
    applier = Applier(checkout, library, force=options.force)
    applier.notes += notes
    if options.installed and not (options.json or options.quiet):
        command = next((m for m in ("check", "status", "reverse") if getattr(options, m)), "apply")
        say(
            f"{command}: the package verl {checkout.version} in {checkout.root}, of the "
            f"environment {sys.prefix}; every program that runs in it is affected"
        )
    began = time.monotonic()
    if options.check:
        report = applier.check()
    elif options.status:
        report = applier.status()
    elif options.reverse:
        report = applier.reverse()
    else:
        report = applier.apply()
    code = 1 if options.status and report.state in ("PARTIAL", "DRIFTED", "WRONG_BASE") else 0
    _print(report, options, code, time.monotonic() - began)
    return code


def _choose_patch(library: Library, options: argparse.Namespace) -> list[str]:
    if options.patch_version:
        library.want(options.patch_version)
    if options.patch_file or options.patch_url:
        data, name, notes = named_patch(
            library,
            options.patch_file,
            options.patch_url,
            options.patch_sha256,
            options.sha256_file,
        )
        library.want_patch(data, name)
        return notes
    if options.patch_sha256 or options.sha256_file:
        raise UsageError("digest-without-patch")
    return []


def _checkout(options: argparse.Namespace) -> Checkout:
    named = [place for place in (options.repo, options.target) if place is not None]
    if len(named) + options.installed != 1:
        raise UsageError("target-count", found=f"{len(named) + options.installed} targets")
    if options.installed:
        return resolve(str(installed_root()), allow_installed=True)
    return resolve(named[0])


def _list(library: Library, options: argparse.Namespace) -> None:
    manifest = library.manifest
    editions = [
        {
            "version": edition.version,
            "patch_sha256": edition.patch_sha256,
            "size_bytes": edition.patch_size,
            "added": [file.path for file in edition.files if file.before is None],
            "modified": [file.path for file in edition.files if file.before is not None],
        }
        for edition in manifest.editions
    ]
    if options.json:
        say_json({"exit_code": 0, "base_commit": manifest.base_commit, "editions": editions})
        return
    say(f"base: verl {manifest.base_tag}, commit {manifest.base_commit}")
    for edition in editions:
        say(
            f"{edition['version']}: sha256 {edition['patch_sha256']}, "
            f"{len(edition['modified'])} files modified, {len(edition['added'])} added"
        )
        if not options.quiet:
            for label in ("modified", "added"):
                for path in edition[label]:
                    say(f"  {label:<8} {path}")


def _print(report: Report, options: argparse.Namespace, code: int, seconds: float) -> None:
    if options.json:
        say_json({"exit_code": code} | asdict(report))
        return
    if options.quiet:
        if report.command == "status":
            say(report.state)
        return
    if report.command == "status":
        version = f" {report.edition}" if report.edition else ""
        say(f"{report.state}{version}: {report.did}")
    else:
        say(f"{report.did} ({seconds:.2f} s)")
    say(f"  target:   {report.target} ({report.kind})")
    for stranger in report.files:
        say(f"  {stranger['path']}: {stranger['why']}")
    for note in report.notes:
        say(f"  note:     {note}")
    command = _next_command(report)
    if command:
        say(f"  next:     {command}")


def _next_command(report: Report) -> str | None:
    """What a person would type next."""
    place = "--installed" if report.kind == "installed package" else f"--repo {report.target}"
    run = f"{program()} {place}"
    if report.command == "check" or report.state in ("PRISTINE", "OTHER_VERSION"):
        return f"{run}   (applies {report.wanted})" if report.command != "reverse" else None
    if report.state == "APPLIED":
        return f"{run} --reverse   (takes it off)"
    return f"{run} --check   (says what is wrong and what to do)"


if __name__ == "__main__":
    sys.exit(main())
