# SPDX-License-Identifier: Apache-2.0
"""The error that ends a command, and guesses at what a mistyped word meant."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class ReportError(Exception):
    """Says in one sentence what is wrong and what to do; the CLI prints it without a traceback."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``: did you mean X?`` for the nearest known word; empty where none is near.

    >>> did_you_mean("--metrcs", ["--metrics", "--list"]), did_you_mean("x", ["--list"])
    (': did you mean --metrics?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def did_you_mean_path(path: str) -> str:
    """The same for a path that does not exist, from what lies beside it."""
    folder = Path(path).parent
    try:
        known = {entry.name: str(folder / entry.name) for entry in folder.iterdir()}
    except OSError:
        return ""
    close = difflib.get_close_matches(Path(path).name, known, n=1)
    return f": did you mean {known[close[0]]}?" if close else ""
