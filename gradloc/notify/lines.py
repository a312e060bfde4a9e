# SPDX-License-Identifier: Apache-2.0
"""Format an event as one line and as table rows, and the command that opens it. Pure, standard library only."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..explain.culprits import carried, trusted_share
from ..explain.cures import healer
from ..explain.numbers import bounded, number
from ..explain.story import headline, pronoun, quote_or_row, says_reason, step_cause
from ..record import Culprit, Event

COLUMNS: dict[str, Callable[[Event, Culprit], Any]] = {
    "event": lambda event, culprit: event.event_id,
    "step": lambda event, culprit: event.step.global_step,
    "token": quote_or_row,
    "position": lambda event, culprit: culprit.positions[0],
    "sequence": lambda event, culprit: culprit.sequence_id,
    "rank": lambda event, culprit: culprit.rank,
    "micro_batch": lambda event, culprit: culprit.micro_batch,
    "share": trusted_share,
    "share_error": lambda event, culprit: None if trusted_share(event, culprit) is None else culprit.share_error,
    "grad_norm": lambda event, culprit: culprit.grad_norm,
    "advantage": lambda event, culprit: culprit.at("advantage"),
}
"""The columns of the trackers' table of culprits."""
DONE = {
    "observe": "step taken",
    "mask": "step taken without the culprits",
    "heal": "step taken as healed",
    "skip": "step skipped",
    "abort": "run ended",
}
"""Words for the action taken."""


def announcement(event: Event) -> str:
    """Announce an event in one line of printable characters: its headline and its numbers.

    ``One token made the step-5 spike: " is" (rank 1) carries 100%, norm 128 (0.897 without it); step taken, clipped``
    """
    norm, certificate, cause = number(event.trigger.grad_norm, 3), event.certificate, step_cause(event)
    if event.culprits:
        after = bounded(certificate.norm_after, certificate.error_bound, 3)[0]
        doubt = "" if certificate.verdict == "explained" else f", {certificate.verdict.replace('_', ' ')}"
        numbers = f"{_who(event)}, norm {norm} ({after} without {pronoun(event)}{doubt})"
    else:
        numbers = f"{cause.reason}, norm {norm}" if cause and not says_reason(cause) else f"norm {norm}"
    scale = event.consequence.clip_scale if event.consequence is not None else None
    clipped = ", clipped" if scale is not None and scale < 1 else ""
    cured = healer(event)
    healed = "" if cured is None else f", {number(cured.norm_after, 3)} with {cured.line}"
    return f"{headline(event)}: {numbers}; {DONE[event.action.taken]}{clipped}{healed}"


def opening_command(event: Event, root: Path) -> str:
    """Return the shell command that shows an event; ``root`` is the absolute folder of events."""
    return shlex.join(["gradloc", str(root), "--event", event.event_id])


def not_written(root: Path, why: str) -> str:
    """Say why there is no command: the event is not on disk."""
    shown = "".join(char if char.isprintable() else " " for char in why)
    return f"this event could not be written to {root}: {shown}"


def table_rows(events: list[Event]) -> list[list[Any]]:
    """Return one row per culprit, under :data:`COLUMNS`."""
    return [[column(event, culprit) for column in COLUMNS.values()] for event in events for culprit in event.culprits]


def _who(event: Event) -> str:
    share, more = carried(event, event.culprits), len(event.culprits) - 1
    first = event.by_size[0]
    carry = "" if share is None else f" {'carry' if more else 'carries'} {share}"
    where = "" if event.step.dp_size == 1 or event.is_without_tokens else f" (rank {first.rank})"
    return f"{quote_or_row(event, first)}{where}{f' and {more} more' if more else ''}{carry}"
