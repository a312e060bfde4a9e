# SPDX-License-Identifier: Apache-2.0
"""What was probably meant by a word on the command line that nobody knows."""

import argparse
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_IS_CLOSE = 0.6


def meant(word: str, known: Iterable[str]) -> str:
    """``: did you mean X?`` for the known word that is nearest; empty where none is near.

    >>> meant("--metrcs", ["--metrics", "--list"]), meant("x", ["--list"])
    (': did you mean --metrics?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_IS_CLOSE)
    return f": did you mean {close[0]}?" if close else ""


def nearby(path: str) -> str:
    """The same of a file or folder that is not there, among those beside it."""
    named = Path(path)
    try:
        names = [entry.name for entry in named.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(named.name, names, n=1, cutoff=_IS_CLOSE)
    return f": did you mean {named.parent / close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, with a guess."""

    def error(self, message: str) -> None:
        """Ends the program with exit code 2."""
        options = [option for parser in self._with_commands() for option in parser._option_string_actions]
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            guess = meant(unknown[1].partition("=")[0], options) if unknown[1].startswith("-") else ""
            message = f"there is no {'option' if unknown[1].startswith('-') else 'argument'} {unknown[1]}{guess or '.'}"
        elif wrong := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", wrong[3])
            message = f"{wrong[1]} is one of {', '.join(known)}, found {wrong[2]}{meant(wrong[2], known) or '.'}"
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help names them all.\n")

    def _with_commands(self) -> list[argparse.ArgumentParser]:
        """Itself and its subcommands' parsers: an unknown option of one is refused by the parser of all."""
        found = [action.choices.values() for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [self, *(parser for parsers in found for parser in parsers)]
