# SPDX-License-Identifier: Apache-2.0
"""The error that ends a command, and guesses for mistyped words."""

import difflib
from collections.abc import Iterable


class ReportError(Exception):
    """Says in one sentence what is wrong and what to do; the CLI prints it without a traceback."""


def sentence(error: OSError) -> str:
    """Return what the system says of a file."""
    return f"{error.filename or 'standard output'}: {error.strerror or error}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Guess ``: did you mean X?`` from the nearest known word; empty where none is near.

    >>> did_you_mean("trian.log", ["train.log", "x"]), did_you_mean("y", ["x"])
    (': did you mean train.log?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""
