# SPDX-License-Identifier: Apache-2.0
"""Puts GradLoc on a verl checkout, or takes it off again.

Nothing is changed unless the content of every file that the patch touches is known, and then all of it or nothing.
Which verl it is, and so which patch, is decided by content. Exit codes: 0 done, or already so; 1 refused because of the
checkout's state; 2 wrong usage; 3 the patch or its checksum is not what it should be; 4 the disk failed, everything was
put back; 5 the disk failed, run again to finish; 6 another run is at work; 7 the network.
"""

import argparse
import re
import sys
import time
from pathlib import Path

from ..command import Parser, guarded, say, say_json
from ..errors import capped, program
from ..tree.checkout import Checkout, installed_root, resolve
from .applier import Applier, Report
from .library import Library, expected_digest, named_patch

PATCHES = Path(__file__).resolve().parents[2] / "patches"


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    made = Parser(prog=program().split()[-1], description=__doc__, allow_abbrev=False)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.epilog = f"example: {program()} --repo ~/src/verl --check"
    add = made.add_argument
    add("target", nargs="?", metavar="VERL", help="the same as --repo VERL")
    add("--repo", metavar="VERL", help="the top folder of a verl tree")
    add("--installed", action="store_true", help="the verl package of the Python that runs this")
    add("--check", action="store_true", help="predict everything (with --reverse: of that), change nothing")
    add("--status", action="store_true", help="say which state the checkout is in")
    add("--reverse", action="store_true", help="take the patch off again")
    add("--list", action="store_true", help="list the patches that this tool carries, and the releases that it knows")
    add("--wait", type=float, default=0.0, metavar="SECONDS", help="how long to wait for another run in the checkout")
    add("--base", metavar="TAG", help="consider the patch for this verl only (v0.7.0); a filter, the content decides")
    source = made.add_mutually_exclusive_group()
    source.add_argument("--patch-file", metavar="FILE", help="a patch other than the built ones")
    source.add_argument("--patch-url", metavar="URL", help="a patch to download (https)")
    source.add_argument("--patch-version", metavar="V", help="refuse unless this is the version that is applied")
    digest = made.add_mutually_exclusive_group()
    digest.add_argument("--sha256", "--patch-sha256", metavar="HEX", help="what the patch's sha256 must be")
    digest.add_argument("--sha256-file", metavar="FILE|URL", help="a list with the patch's sha256")
    force = "skip the checks for a half patched tree and unfinished git operations; never overwrites unknown content"
    add("--force", action="store_true", help=force)
    add("--json", action="store_true", help="print one JSON object, for refusals too")
    add("--quiet", action="store_true", help="print errors only (with --status: the state alone)")
    add("--debug", action="store_true", help="show a traceback on an error")
    add("--patches", type=Path, default=PATCHES, help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(parser().parse_args(given)), "--debug" in given, "--json" in given)


def _run(options: argparse.Namespace) -> int:
    modes = [name for name in ("check", "status", "reverse", "list") if getattr(options, name)]
    if len(modes) > 1 and modes != ["check", "reverse"]:
        parser().error(f"--{modes[0]} and --{modes[1]} do not go together")
    library, is_named = Library(options.patches), bool(options.patch_file or options.patch_url)
    first = library.manifest.entries[0].name
    if options.sha256 and not re.fullmatch("[0-9A-Fa-f]{64}", options.sha256):
        parser().error("--sha256 is not 64 hex digits: it was cut when copied")
    digest, notes = (None, []) if is_named else expected_digest(options, first)
    library.only(options.base, options.patch_version, digest)
    if options.list:
        return _list(library, options)
    if is_named:
        data, name, notes = named_patch(library, options)
        library.want_patch(data, name)
    targets = [place for place in (options.repo, options.target) if place is not None]
    if len(targets) + options.installed != 1:
        parser().error(f"exactly one target is needed, and {len(targets) + options.installed} were named")
    target = str(installed_root()) if options.installed else targets[0]
    checkout = resolve(target, allow_installed=options.installed)
    applier = Applier(checkout, library, force=options.force, wait_s=options.wait)
    applier.notes += notes
    command = modes[0] if modes else "apply"
    if options.installed and not (options.json or options.quiet):
        where = f"the package verl {checkout.version} in {checkout.root}, of the environment {sys.prefix}"
        say(f"{command}: {where}; every program that runs in it is affected")
    began = time.monotonic()
    report = applier.check(options.reverse) if command == "check" else getattr(applier, command)()
    code = 1 if command == "status" and report["state"] in ("PARTIAL", "DRIFTED", "WRONG_BASE") else 0
    _print(report, checkout, options, code, time.monotonic() - began)
    return code


def _list(library: Library, options: argparse.Namespace) -> int:
    listed = []
    for base, editions in library.families:
        for edition in editions:
            one = {"version": edition.version, "base": base.tag, "commit": base.commit, "patch_sha256": edition.sha256}
            files: dict[str, list[str]] = {"modified": [], "added": []}
            for path, file in edition.files.items():
                files["added" if file.before is None else "modified"].append(path)
            listed.append(one | files | {"is_carried": edition.patch is not None})
            if options.json:
                continue
            carried = "" if edition.patch else "; known, so that it can be upgraded or taken off"
            counts = f"{len(files['modified'])} files modified, {len(files['added'])} added{carried}"
            known = f"{edition.version} for verl {base.tag} ({base.commit[:12]})"
            say(f"{known}: sha256 {edition.sha256}, {counts}", is_result=True)
            if not options.quiet:
                say("\n".join(f"  {label:<8} {path}" for label in files for path in files[label]), is_result=True)
    if options.json:
        say_json({"exit_code": 0, "editions": listed}, is_result=True)
    return 0


def _print(report: Report, checkout: Checkout, options: argparse.Namespace, code: int, seconds: float) -> None:
    is_status, is_result = report["command"] == "status", report["command"] in ("check", "status")
    if options.json:
        say_json({"exit_code": code} | report, is_result)
    elif options.quiet and is_status:
        say(report["state"], is_result=True)
    elif not options.quiet:
        version = f" {report['edition']}" if report["edition"] else ""
        lines = [f"{report['state']}{version}: {report['did']}" if is_status else f"{report['did']} ({seconds:.2f} s)"]
        lines.append(f"  target:   {report['target']} ({report['kind']}; the patch for verl {report['base']})")
        lines += [
            f"  {line}" for line in capped(f"{stranger['path']}: {stranger['why']}" for stranger in report["files"])
        ]
        lines += [f"  note:     {note}" for note in report["notes"]]
        lines += [f"  next:     {command}" for command in _next_command(report, checkout.command, options.reverse)]
        say("\n".join(lines), is_result=is_result)


def _next_command(report: Report, run: str, reverse: bool) -> list[str]:
    """What a person would type next."""
    if report["state"] == "APPLIED" and report["command"] != "check" or (report["command"] == "check" and reverse):
        return [f"{run} --reverse   (takes it off)"]
    if report["command"] == "check" or report["state"] in ("PRISTINE", "OTHER_VERSION"):
        return [f"{run}   (applies {report['wanted']})"] if report["command"] != "reverse" else []
    return [f"{run} --check   (says what is wrong and what to do)"]
