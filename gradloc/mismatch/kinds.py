# SPDX-License-Identifier: Apache-2.0
"""The kinds of disagreement: what each is, how it shows, what people did about it. The words: explain/mismatch.ini."""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter

from ..explain.advice import read_table
from ..explain.numbers import number, percent


@dataclass(frozen=True)
class Kind:
    """One section of the table."""

    title: str
    sentence: str
    shows: str
    seen: str
    """Sentences on the numbers that the verdict rests on, separated by bars."""
    helps: str
    threads: str
    """Public threads in which this was found, or mended."""

    def evidence(self, numbers: Mapping[str, float | str]) -> str:
        """Say by which numbers the kind was named; a sentence without its numbers is left out."""
        parts = [part.strip() for part in self.seen.split("|")]
        return " ".join(_FORMATTER.format(part, **numbers) for part in parts if _names(part) <= numbers.keys())


class _Numbers(Formatter):
    """Formats numbers as all of GradLoc's sentences do: ``%`` in percent, a digit with that many digits, else three."""

    def format_field(self, value: float | str, format_spec: str) -> str:
        if isinstance(value, str):
            return value
        return percent(value, 2) if format_spec == "%" else number(value, int(format_spec or 3))


_FORMATTER = _Numbers()


def _names(text: str) -> set[str]:
    return {name for _, name, _, _ in _FORMATTER.parse(text) if name}


_TABLE = read_table("mismatch.ini")
DOUBTS = _TABLE.pop("doubts")
"""Sentences added to a verdict, by name, where the kind alone would mislead."""
NUMBERS = _TABLE.pop("numbers")
"""Labels of the evidence's numbers."""
REPOSITORIES = _TABLE.pop("repositories")
"""GitHub repositories of the public threads, by lower-case project."""
SETTINGS = _TABLE.pop("settings")
"""Settings with which a trainer logs how much rollout and trainer differ, by trainer."""
KINDS = {name: Kind(**section) for name, section in _TABLE.items()}
NOTHING = "cannot tell"
