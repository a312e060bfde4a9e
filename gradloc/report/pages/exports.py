# SPDX-License-Identifier: Apache-2.0
"""Exports a run's events as JSON and CSV."""

import csv
import io
import json
from collections.abc import Callable
from typing import Any

from ...explain.culprits import trusted_share
from ...explain.cures import healer
from ...explain.story import cause_of
from ...record import Culprit, Event
from ...record.columns import OF_A_TOKEN
from ..output import as_json
from ..runs.run import RunFolder
from .markdown import to_markdown

EVENT_COLUMNS: dict[str, Callable[[Event], Any]] = {
    "event_id": lambda event: _quoted(event.event_id),
    "global_step": lambda event: event.step.global_step,
    "mini_batch": lambda event: event.step.mini_batch,
    "grad_norm": lambda event: event.trigger.grad_norm,
    "threshold": lambda event: event.trigger.threshold,
    "fault": lambda event: None if event.fault is None else _quoted(event.fault.at),
    "certificate": lambda event: _quoted(event.certificate.verdict),
    "norm_after": lambda event: event.certificate.norm_after,
    "action": lambda event: _quoted(event.action.taken),
    "healed_by": lambda event: None if (cured := healer(event)) is None else _quoted(cured.name),
    "norm_healed": lambda event: None if (cured := healer(event)) is None else cured.norm_after,
}
CULPRIT_COLUMNS: dict[str, Callable[[Event, Culprit], Any]] = {
    "span": lambda _, culprit: _quoted(culprit.span),
    "rank": lambda _, culprit: culprit.rank,
    "micro_batch": lambda _, culprit: culprit.micro_batch,
    "micro_batch_row": lambda _, culprit: culprit.micro_batch_row,
    "first_position": lambda _, culprit: culprit.positions[0] if culprit.positions else None,
    "num_tokens": lambda _, culprit: len(culprit.positions),
    "sequence_id": lambda _, culprit: _quoted(culprit.sequence_id),
    "data_source": lambda _, culprit: _quoted(culprit.data_source),
    "tokens": lambda _, culprit: json.dumps(culprit.text),
    "cause": lambda _, culprit: _quoted(culprit.cause.label),
    "share": trusted_share,
    "share_error": lambda event, culprit: None if trusted_share(event, culprit) is None else culprit.share_error,
    "culprit_norm": lambda _, culprit: culprit.grad_norm,
    **{name: lambda _, culprit, name=name: culprit.at(name) for name in OF_A_TOKEN},
}


def to_json(run: RunFolder, events: list[Event]) -> str:
    """Write the events and notes as JSON; where there is no event, also the diagnosis of each run.

    Numbers that are not finite are strings.
    """
    document: dict[str, Any] = {"run": run.name, "notes": run.notes, "events": [*events]}
    if not run.events:
        said = ("kind", "headline", "sentences", "command", "ground", "limits")
        document["diagnoses"] = [
            {"run": found.run.name, "unit": found.run.unit, "judged": found.is_judged}
            | {name: getattr(found, name) for name in said}
            for found in run.diagnoses
        ]
    return as_json(document)


def to_csv(run: RunFolder, events: list[Event]) -> str:
    """Write one line per culprit; an event without culprits has one line with its cause.

    Tokens and names are JSON strings, whose quotes keep a spreadsheet from running ``=...`` as a formula.
    """
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([*EVENT_COLUMNS, *CULPRIT_COLUMNS])
    for event in events:
        head = [of(event) for of in EVENT_COLUMNS.values()]
        for culprit in event.culprits:
            writer.writerow(head + [of(event, culprit) for of in CULPRIT_COLUMNS.values()])
        if not event.culprits:
            writer.writerow(head + [(cause_of(event) or None) if name == "cause" else None for name in CULPRIT_COLUMNS])
    return sink.getvalue()


def _quoted(text: str | None) -> str | None:
    """Quote text as a JSON string, unless it is plain words."""
    if text is None or text.replace("_", "").replace("-", "").isalnum() and not text.startswith("-"):
        return text
    return json.dumps(text)


FORMATS = {"md": to_markdown, "json": to_json, "csv": to_csv}
