# SPDX-License-Identifier: Apache-2.0
"""Records to be told."""

from typing import Any

from gradloc.record import Event
from gradloc.record.reading import read
from tests.report.builder import make_event


def event(at: int = 5, /, **changes: Any) -> Event:
    """The report's made-up event of this step; of a part of it that is given, what is given is changed."""
    made = make_event(at)
    for name, part in changes.items():
        made[name] = made[name] | part if isinstance(part, dict) and made.get(name) else part
    return read(Event, made)
