# SPDX-License-Identifier: Apache-2.0
"""``gradloc PATH``: what happened, in the terminal, as the page, or as an export."""

import argparse
import sys
from pathlib import Path

from .. import output
from ..errors import ReportError
from ..pages import exports, page, terminal
from ..runs.events import Events
from ..runs.health import judge
from ..runs.run import RunFolder, has_events, read_logs, read_run
from . import EXIT_CODES, add_fail_on, add_log_arguments, exit_code

EPILOG = f"""\
examples:
  gradloc train.log
  gradloc runs/demo-1 -o report.html
  gradloc train.log --json --fail-on found

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a run's folder or events.jsonl, or logs of runs without gradloc: files, folders, - for standard input",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file; HTML by default")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--format", choices=exports.FORMATS, help="write this instead of HTML; without -o, print it")
    form.add_argument("--json", action="store_const", const="json", dest="format", help="as --format json")
    form.add_argument("--list", action="store_true", help="the events' names and nothing else")
    parser.add_argument("--event", action="append", metavar="ID", help="only this event; may be given again")
    parser.add_argument(
        "--metrics", type=Path, metavar="PATH", help="the run's metrics, where they are not in its folder"
    )
    add_log_arguments(parser)
    add_fail_on(parser)


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        if args.list:
            raise ReportError("--list prints the events' names and nothing else: leave -o out.")
        output.check(args.output, args.format, args.paths)
    if len(args.paths) == 1:
        folder = read_run(args.paths[0], args.metrics, args.metric, args.pattern)
    elif args.metrics is not None:
        raise ReportError("--metrics goes with the folder of one run: name it alone.")
    else:
        folder = read_logs(args.paths, args.metric, pattern=args.pattern)
        with_events = [path for path in args.paths if has_events(path)]
        folder.notes += [f"{path} has events: name it alone to see them." for path in with_events]
    events = Events(map(folder.find, args.event)) if args.event else folder.events
    if args.list and folder.events_root is None:
        raise ReportError(f"{folder.path} is a log, and --list names the events that GradLoc wrote: leave it out.")
    if args.format == "csv" and not events:
        raise ReportError(f"{folder.path} has no event, and --format csv writes one line for each: use --json.")
    if args.list:
        for row in events.rows:
            output.say(row.event_id)
    elif args.format or args.output:
        write = exports.FORMATS[args.format] if args.format else page.render
        output.deliver(args.output, write(folder, events))
        if not args.format and not output.is_standard(args.output):
            output.say(f"Open it in a browser: {args.output.resolve().as_uri()}", sys.stderr)
    elif not folder.events:
        terminal.diagnosis(folder)
    else:
        terminal.summary(folder, events)
    terminal.warn(folder.notes)
    return _code(folder, args.fail_on)


def _code(folder: RunFolder, fail_on: str | None) -> int:
    """Return the exit code by the events, or by all runs of a log."""
    if folder.events:
        states = [health.worst.state] if fail_on not in (None, "found") and (health := judge(folder.metrics)) else []
        return exit_code(fail_on, True, True, states)
    found = folder.diagnoses
    states = [health.worst.state for run in folder.runs if (health := judge(run.parts))] if fail_on else []
    return exit_code(fail_on, any(each.is_judged for each in found), any(each.kind for each in found), states)
