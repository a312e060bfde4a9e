# SPDX-License-Identifier: Apache-2.0
"""The list of events as the page's script shows, searches, sorts and filters it: one small record each.

It holds what a reader sees of an event before opening it, and of those that are too many to be
carried whole, all that the page has.
"""

import math
from typing import Any

from ...record import Event
from ...words.leader import leader
from ...words.numbers import bounded, number
from ...words.story import cause_of, headline
from ...words.text import one_line, spoken, times, visible
from ..runs.run import RunFolder

WORDS = 400
"""Characters of a culprit list that can be searched."""


def rows(events: list[Event], run: RunFolder, carried: set[str]) -> list[dict[str, Any]]:
    """One record per event, in the order given; ``carried`` names the events that the page holds whole."""
    return [_row(event) | ({} if event.event_id in carried else _outline(event, run)) for event in events]


def _row(event: Event) -> dict[str, Any]:
    norm, excess = event.trigger.grad_norm, times(event.trigger.grad_norm, event.trigger.threshold)
    first = leader(event.culprits)
    tokens = " ".join(dict.fromkeys(one_line(c.text, 24) for c in event.culprits))
    mini = f".{event.step.mini_batch}" if event.step.mini_batch else ""
    return {
        "id": event.event_id,
        "step": f"{event.step.global_step}{mini}",
        "norm": number(norm),
        "size": _sortable(norm),
        "excess": number(norm) if excess is None else f"{number(excess, 3)}×",
        "times": _sortable(norm if excess is None else excess),
        "count": len(event.culprits),
        "token": one_line(first.text, 24) if first else "",
        "cause": spoken(cause_of(event)) or "–",
        "verdict": spoken(event.certificate.verdict),
        "action": event.action.taken,
        "words": tokens[:WORDS],
    }


def _outline(event: Event, run: RunFolder) -> dict[str, str]:
    first = leader(event.culprits)
    return {
        "headline": headline(event),
        "before": visible((first and first.text_before) or "")[-100:],
        "marked": visible(first.text)[:60] if first else "",
        "after": visible((first and first.text_after) or "")[:60],
        "without": bounded(event.certificate.norm_after, event.certificate.error_bound, 3)[0],
        "threshold": number(event.trigger.threshold, 3),
        "command": run.show_command(event.event_id),
    }


def _sortable(value: float | None) -> float | str:
    if value is None:
        return -1
    return float(f"{value:.6g}") if math.isfinite(value) else "Infinity"
