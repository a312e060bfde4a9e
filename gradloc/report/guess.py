# SPDX-License-Identifier: Apache-2.0
"""What was probably meant by a word on the command line that nobody knows."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
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
    folder, name = Path(path).parent, Path(path).name
    try:
        close = difflib.get_close_matches(name, [entry.name for entry in folder.iterdir()], n=1, cutoff=_IS_CLOSE)
    except OSError:
        return ""
    return f": did you mean {folder / close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence, with a guess."""

    _command: argparse.ArgumentParser | None = None

    def error(self, message: str) -> None:
        """Ends the program with exit code 2."""
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            command = self._command or self
            guess = meant(unknown[1].partition("=")[0], command._option_string_actions) or "."
            kind, guess = ("option", guess) if unknown[1].startswith("-") else ("argument", ".")
            message = f"{command.prog.rpartition(' ')[2]} takes no {kind} {unknown[1]}{guess}"
        elif wrong := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", wrong[3])
            message = f"{wrong[1]} is one of {', '.join(known)}, found {wrong[2]}{meant(wrong[2], known) or '.'}"
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:
        """As argparse; an unknown option of a subcommand is refused by the parser of all, which has to know it."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and args:
                self._command = action.choices.get(args[0])
        return super().parse_args(args)
