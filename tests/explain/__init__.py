# SPDX-License-Identifier: Apache-2.0
"""Records to be told."""

from dataclasses import replace
from typing import Any

from gradloc.record import Culprit, Event
from gradloc.record.columns import OF_A_TOKEN
from gradloc.record.reading import read
from tests.report.builder import make_event


def event(at: int = 5, /, **changes: Any) -> Event:
    """The report's made-up event of this step, as :func:`~tests.report.builder.make_event` makes it."""
    return read(Event, make_event(at, **changes))


def a_culprit(made: Culprit | None = None, /, **changes: Any) -> Culprit:
    """A culprit with some parts of its record and some numbers of its token changed; None takes a number out."""
    made = made or Culprit()
    numbers = {name: changes.pop(name) for name in [*changes] if name in OF_A_TOKEN}
    known = {name: value for name, value in (made.values | numbers).items() if value is not None}
    return replace(made, values=known, **changes)
