# SPDX-License-Identifier: Apache-2.0
"""What every reader returns: rows of numbers in the order in which they were written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = tuple[int, dict[str, float]]
"""A training step and what was logged for it. A step may come again: a resumed run logs it twice."""


@dataclass
class Recording:
    """One run as one file, folder or database holds it."""

    source: str
    """The file's or folder's name."""
    format: str = ""
    """What wrote it, in words."""
    run: str = ""
    """The run's name, where the source says one."""
    process: str = ""
    """Of a log that several processes print into, which one; a resumed run is another process."""
    rows: list[Row] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings by their dotted names, where the source holds them."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each thing that could not be read, or had to be guessed."""
    verdicts: list[str] = field(default_factory=list)
    """GradLoc's sentences about its events."""
    folder: Path | None = None
    """Where it lies; None for standard input."""
    receipt: str = ""
    """How much of the file was read."""
    is_counted: bool = False
    """Whether its lines do not say the trainer's step, so that steps were counted."""


def gather(values: Iterable[tuple[int, str, float]]) -> list[Row]:
    """Rows from single values in the order in which they were written.

    >>> gather([(1, "a", 0.5), (1, "b", 2.0), (2, "a", 0.25), (1, "a", 4.0)])
    [(1, {'a': 0.5, 'b': 2.0}), (2, {'a': 0.25}), (1, {'a': 4.0})]
    """
    rows: list[Row] = []
    for step, name, value in values:
        if not rows or rows[-1][0] != step or name in rows[-1][1]:
            rows.append((step, {}))
        rows[-1][1][name] = value
    return rows


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flat({"actor": {"optim": {"lr": 1e-06}}, "n": [1]})
    {'actor.optim.lr': 1e-06, 'n': [1]}
    """
    if not isinstance(settings, dict):
        return {prefix: settings} if prefix else {}
    made = {}
    for key, value in settings.items():
        made.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return made
