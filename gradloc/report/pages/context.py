# SPDX-License-Identifier: Apache-2.0
"""Where an event stands: when and by what it was made, how often its like came in the run, which data it is about."""

from collections.abc import Sequence
from datetime import datetime

from ...record import Event
from ...words.culprits import leader
from ...words.story import cause_of
from ...words.text import one_line, plural, spoken


def context(event: Event, events: Sequence[Event]) -> list[tuple[str, str]]:
    """What is known of an event among all of its run's: names and values, without what the record does not say."""
    run, first = event.run, leader(event.culprits)
    made_by = (run.trainer, run.torch and f"torch {run.torch}", run.gradloc and f"gradloc {run.gradloc}")
    row = "" if first is None or first.data_row is None else f"row {first.data_row}"
    known = {
        "when": _when(event.time),
        "made by": ", ".join(filter(None, made_by)),
        "model": run.model and one_line(run.model, 90, keep="end"),
        "commit": run.commit,
        "config": run.config,
        "data": ", ".join(filter(None, (first and first.data_source, row))),
        "seen": _seen(event, events),
    }
    return [(name, one_line(value)) for name, value in known.items() if value]


def _when(time: str | None) -> str | None:
    try:
        at = datetime.fromisoformat((time or "").replace("Z", "+00:00"))
        return f"{at.day} {at:%b %Y, %H:%M} UTC"
    except ValueError:
        return time


def _kind(event: Event) -> tuple[str, str]:
    """Events of one kind have the same cause, and the same text of the largest culprit."""
    first = leader(event.culprits)
    return cause_of(event), first.text if first else ""


def _seen(event: Event, events: Sequence[Event]) -> str:
    """How often this token with this cause, and how often this cause."""
    cause = cause_of(event)
    alike = [other.step.global_step for other in events if _kind(other) == _kind(event)]
    same = sum(cause_of(other) == cause for other in events)
    of = f"{spoken(cause) if cause else 'no cause'}: {same} of {plural(len(events), 'event')}"
    if len(alike) < 2:
        return f"once, at step {event.step.global_step}" + (f"; {of}" if len(events) > 1 else "")
    again = "this token" if event.culprits else "the same"
    return f"{again} {len(alike)} times, first at step {min(alike)}, last at step {max(alike)}; {of}"
