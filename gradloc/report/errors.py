# SPDX-License-Identifier: Apache-2.0
"""The error that ends a command, and guesses for mistyped words."""

import difflib
import re
from collections.abc import Iterable

_ENDING = re.compile(r"(?<=.)\.\w+$")
_ALIKE = 0.6
"""Share of letters that two words have in common from which one is guessed from the other."""


class ReportError(Exception):
    """Says in one sentence what is wrong and what to do; the CLI prints it without a traceback."""


def sentence(error: OSError) -> str:
    """Return what the system says of a file."""
    return f"{error.filename or 'standard output'}: {error.strerror or error}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Guess ``: did you mean X?`` from the known word that is most alike; empty where none is.

    The hyphens of options and an ending that two names share, such as ``.log``, make them no more alike.

    >>> did_you_mean("trian.log", ["train.log", "x"]), did_you_mean("a.log", ["b.log", "x"])
    (': did you mean train.log?', '')
    """
    near: dict[str, float] = {}
    for name in known:
        pair = [word.lstrip("-"), name.lstrip("-")]
        if name != word and (ending := _ENDING.search(word)) and name.endswith(ending[0]):
            pair = [each.removesuffix(ending[0]) for each in pair]
        near[name] = difflib.SequenceMatcher(None, *pair).ratio()
    best = max(near, key=near.__getitem__, default="")
    return f": did you mean {best}?" if near.get(best, 0.0) >= _ALIKE else ""
