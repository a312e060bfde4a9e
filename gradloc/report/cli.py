# SPDX-License-Identifier: Apache-2.0
"""The command line, which runs a subcommand and prints its errors in one sentence.

``gradloc RUN_DIR`` is short for ``gradloc report RUN_DIR``, of which ``show`` is the older name. A folder that has a
subcommand's name needs ``./`` before it.
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..explain.text import capitalized, one_line
from . import __version__
from .commands import COMMANDS
from .errors import ReportError, did_you_mean, sentence
from .output import say, silence


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0; 1 where ``--fail-on`` asks for it; 2 after an error, or where
    nothing can be judged; 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    if "" in words:
        raise ReportError("one of the words is empty: a variable of the shell may have no value.")
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    if words[:1] == ["show"]:
        words[0] = "report"
    name = words.pop(0) if words and words[0] in COMMANDS else "report"
    module = importlib.import_module(f".commands.{name}", __package__)
    args = _parse(name, module, words)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal may not know every token's characters
    warnings.simplefilter("ignore", UserWarning)  # of other packages, about a file
    return module.run(args)


def guarded(work: Callable[[], int]) -> int:
    """Return the exit code of ``work``; print an error in one line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    code = 0
    try:
        code = work()
        sys.stdout.flush()
        return code
    except ReportError as error:
        say(f"gradloc: {one_line(str(error), 5000)}", sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("gradloc"):
            raise
        say(f"gradloc: {error.name} is needed for this and not installed: pip install {error.name}", sys.stderr)
        return 2
    except BrokenPipeError:
        silence()
        return code
    except OSError as error:  # a file that may not be read, or went away
        say(f"gradloc: {one_line(sentence(error), 5000)}", sys.stderr)
        return 2
    except (MemoryError, RecursionError) as error:
        say(f"gradloc: the input needs more memory than there is ({type(error).__name__}).", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Refuses wrong usage in one line, as everything else is refused."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}; see {self.prog} --help.")


def _parse(name: str, module: Any, words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"gradloc {name}",
        description=f"{capitalized(COMMANDS[name])}.",
        epilog=getattr(module, "EPILOG", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    # paths may be between options, which the intermixed form reads; it does not know what -- means
    parse = parser.parse_known_args if "--" in words else parser.parse_known_intermixed_args
    args, unknown = parse(words)
    places = [action.dest for action in parser._get_positional_actions() if action.type is Path]
    paths = [str(path) for place in places for path in _listed(getattr(args, place))]
    if paths.count("-") > 1:
        raise ReportError(f"- is standard input, which can be read once, found {paths.count('-')} times: name files.")
    for path in paths:
        if path in COMMANDS and not Path(path).exists():
            raise ReportError(f"{path} is a subcommand, which is given once and first: see gradloc {path} --help.")
    if unknown and not unknown[0].startswith("-"):
        takes = " ".join(str(action.metavar) for action in parser._get_positional_actions())
        raise ReportError(f"{name} takes {takes} alone, found {unknown[0]} as well: quote a path that has blanks.")
    if unknown:
        guess = did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions) or "."
        raise ReportError(f"{name} does not take {unknown[0]}{guess}")
    return args


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
