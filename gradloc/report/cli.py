# SPDX-License-Identifier: Apache-2.0
"""The command line: finds the subcommand, runs it, and words what goes wrong in one place.

``gradloc-report RUN_DIR`` is short for ``gradloc-report show RUN_DIR``. A folder that is called
like a subcommand can be named with ``./`` before it.
"""

import argparse
import difflib
import importlib
import os
import shlex
import sys
from pathlib import Path

from . import __version__
from .errors import ReportError
from .guess import Parser, nearby

COMMANDS = {
    "show": "what happened in a run, from its events or from its log alone; the page with -o",
    "compare": "two runs side by side",
    "watch": "a run that is going on: norm, threshold, health, events as they come; --serve for the page",
    "health": "healthy, warning or danger, step by step, with reasons and what people do",
    "trigger": "which steps the trigger would have flagged, with these settings or others",
    "buckets": "a run's gradient analyses: figures by reward variance, or three steps in one",
    "quartiles": "which tokens' gradients dominate, by probability: figures and tables",
}
DEFAULT = "show"
EPILOG = """\
examples:
  gradloc-report train.log                        any run's log: what exploded, and what that did
  gradloc-report runs/demo-1                      a summary in the terminal
  gradloc-report runs/demo-1 -o report.html       the whole report, one file
  gradloc-report runs/demo-1 --event ID -o e.html one event with every token
  gradloc-report runs/demo-1 --format csv         one line per culprit
  gradloc-report health runs/demo-1               was the run well, step by step
  gradloc-report compare runs/a runs/b            two runs side by side
  gradloc-report trigger train.log --set cap=6    what the trigger would have flagged
  gradloc-report watch runs/demo-1                a run that is going on
"""


def parser() -> argparse.ArgumentParser:
    """The parser with every subcommand's arguments."""
    made = Parser(
        prog="gradloc-report",
        description="Shows what spiked in a run, which tokens did it, and why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=__version__)
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module, said = _module(name), f"{summary[0].upper()}{summary[1:]}."
        sub = commands.add_parser(name, help=summary, description=said, epilog=getattr(module, "EPILOG", None))
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(sub)
    return made


def _module(name: str):
    return importlib.import_module(f".commands.{name}", __package__)


def _meant(arguments: list[str]) -> str | None:
    """A sentence for what looks like a mistyped command or path: there is no file or folder of that name."""
    said = arguments[1] if len(arguments) > 1 else "-"
    if arguments[0] == "watch" or said.startswith("-") or Path(said).exists():  # a run may be about to begin
        return None
    rest = shlex.join(arguments[2:])
    if arguments[0] == DEFAULT:
        nothing = f"there is no file or folder {said} and no command of that name:"
        commands = difflib.get_close_matches(said, COMMANDS, n=1, cutoff=0.7)
        if commands:
            return f"{nothing} did you mean `gradloc-report {commands[0]} {rest or 'RUN_DIR'}`?"
        if len(arguments) > 2 and Path(arguments[2]).exists():
            return f"{nothing} `gradloc-report {rest}` shows a run; the commands are {', '.join(COMMANDS)}."
    guess = nearby(said)
    return f"there is no file or folder {said}{guess}" if guess else None


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 when there is nothing to show."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_named = arguments and arguments[0] in (*COMMANDS, "-h", "--help", "--version")
    if arguments and not is_named:
        arguments.insert(0, DEFAULT)
    hint = _meant(arguments) if arguments else None
    if hint:
        print(f"gradloc-report: {hint}", file=sys.stderr)
        return 2
    args = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a token may be more than the terminal can say
    try:
        return _module(args.command).run(args)
    except ReportError as error:
        print(f"gradloc-report: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that may not be read, or went away
        print(f"gradloc-report: {error.filename or 'a file'}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
