# SPDX-License-Identifier: Apache-2.0
"""The error that ends a command; what options set, and guesses at what a mistyped word meant."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ReportError(Exception):
    """Says in one sentence what is wrong and what to do; the CLI prints it without a traceback."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``: did you mean X?`` for the nearest known word; empty where none is near.

    >>> did_you_mean("trian.log", ["train.log", "x"]), did_you_mean("y", ["x"])
    (': did you mean train.log?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def assignments(given: Iterable[str], prefix: str, values: str) -> dict[str, Any]:
    """What ``--set KEY=VALUE`` sets, by name; a key may be the setting's full one, with what is before ``prefix``.

    >>> assignments(["trainer.health.policy_kl=[0.2,null]", "window=8"], "health.", "")
    {'policy_kl': [0.2, None], 'window': 8}
    """
    settings = {}
    for entry in given:
        key, _, text = entry.partition("=")
        try:
            settings[key.rpartition(prefix)[2].strip()] = json.loads(text.lower())
        except ValueError:
            raise ReportError(f"--set {entry} cannot be read: write KEY=VALUE with {values}.") from None
    return settings
