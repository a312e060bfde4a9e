# SPDX-License-Identifier: Apache-2.0
"""The kinds of disagreement: what each is, how it shows, what people did about it. The words: explain/mismatch.ini."""

from dataclasses import dataclass

from ..explain.advice import read_table


@dataclass(frozen=True)
class Kind:
    """One section of the table."""

    title: str
    sentence: str
    shows: str
    helps: str
    threads: str
    """Public threads in which this was found, or mended."""


_TABLE = read_table("mismatch.ini")
DOUBTS = _TABLE.pop("doubts")
"""Sentences added to a verdict, by name, where the kind alone would mislead."""
NUMBERS = _TABLE.pop("numbers")
"""Labels of the evidence's numbers."""
REPOSITORIES = _TABLE.pop("repositories")
"""GitHub repositories of the public threads, by lower-case project."""
KINDS = {name: Kind(**section) for name, section in _TABLE.items()}
NOTHING = "cannot tell"
