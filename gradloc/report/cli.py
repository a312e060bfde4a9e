# SPDX-License-Identifier: Apache-2.0
"""The command line, which runs a subcommand and prints its errors in one sentence.

``gradloc RUN_DIR`` is short for ``gradloc show RUN_DIR``. A folder that has a subcommand's name needs ``./`` before it.
"""

import argparse
import importlib
import os
import sys
import warnings

from ..explain.text import capitalized, one_line
from . import __version__
from .commands import COMMANDS
from .errors import ReportError, did_you_mean
from .output import say


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0; 1 where ``--fail-on`` asks for it; 2 after an error, or where
    nothing can be judged; 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] not in (*COMMANDS, "-h", "--help", "--version"):
        argv.insert(0, "show")
    try:
        args = _parse(argv)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # a terminal may not know every token's characters
        warnings.simplefilter("ignore", UserWarning)  # of other packages, about a file
        return _module(args.command).run(args)
    except ReportError as error:
        say(f"gradloc: {one_line(str(error), 5000)}", sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that may not be read, or went away
        say(f"gradloc: {one_line(str(error.filename or 'a file'))}: {error.strerror or error}.", sys.stderr)
        return 2
    except (MemoryError, RecursionError) as error:
        say(f"gradloc: the input needs more memory than there is ({type(error).__name__}).", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gradloc")  # gradloc/command.py has its help
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        module = _module(name)
        sub = commands.add_parser(
            name,
            prog="gradloc" if name == "show" else f"gradloc {name}",
            help=summary,
            description=f"{capitalized(summary)}.",
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands.choices[args.command]._option_string_actions
        guess = did_you_mean(unknown[0].partition("=")[0], known) or "."
        raise ReportError(f"{args.command} does not take {unknown[0]}{guess}")
    return args


def _module(name: str):
    return importlib.import_module(f".commands.{name}", __package__)
