# SPDX-License-Identifier: Apache-2.0
"""Records to be told."""

from typing import Any

from gradloc.record import Event
from gradloc.record.reading import read
from tests.report.builder import make_event


def event(at: int = 5, /, **changes: Any) -> Event:
    """The report's made-up event of this step, as :func:`~tests.report.builder.make_event` makes it."""
    return read(Event, make_event(at, **changes))
