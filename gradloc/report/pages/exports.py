# SPDX-License-Identifier: Apache-2.0
"""A run's events as Markdown, JSON and CSV: for an issue, a script, a spreadsheet."""

import csv
import io
import json
from typing import Any

from ...record import Culprit, Event
from ...record.store import plain
from ...words.shares import told_share
from ...words.story import cause_of
from ..runs.run import RunFolder
from .eventview import plain_view
from .issue import escape, issue

EVENT_COLUMNS = (
    "event_id",
    "global_step",
    "mini_batch",
    "grad_norm",
    "threshold",
    "certificate",
    "norm_after",
    "action",
)
CULPRIT_COLUMNS = (
    "span",
    "rank",
    "micro_batch",
    "micro_batch_row",
    "first_position",
    "num_tokens",
    "sequence_id",
    "data_source",
    "tokens",
    "cause",
    "share",
    "share_error",
    "culprit_norm",
    "advantage",
    "log_prob",
    "ratio",
    "coefficient",
)


def to_json(run: RunFolder, events: list[Event]) -> str:
    """The events' records with what was noted while reading; non-finite numbers are spelled out."""
    document = {"run": run.name, "notes": run.notes, "events": events}
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def to_csv(run: RunFolder, events: list[Event]) -> str:
    """One line per culprit; an event without culprits has one line with those columns empty but its cause.

    Tokens and names are JSON strings: their quotes keep a spreadsheet from running ``=...`` as a
    formula.
    """
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(EVENT_COLUMNS + CULPRIT_COLUMNS)
    for event in events:
        for culprit in event.culprits or [None]:
            writer.writerow(_row(event, culprit))
    return sink.getvalue()


def _row(event: Event, culprit: Culprit | None) -> list[Any]:
    head = [
        _quoted(event.event_id),
        event.step.global_step,
        event.step.mini_batch,
        event.trigger.grad_norm,
        event.trigger.threshold,
        _quoted(event.certificate.verdict),
        event.certificate.norm_after,
        _quoted(event.action.taken),
    ]
    if culprit is None:
        return head + [(cause_of(event) or None) if name == "cause" else None for name in CULPRIT_COLUMNS]
    share = told_share(event, culprit)
    return head + [
        _quoted(culprit.span),
        culprit.rank,
        culprit.micro_batch,
        culprit.micro_batch_row,
        culprit.positions[0] if culprit.positions else None,
        len(culprit.positions),
        _quoted(culprit.sequence_id),
        _quoted(culprit.data_source),
        json.dumps(culprit.text),
        _quoted(culprit.cause.label),
        share,
        culprit.share_error if share is not None else None,
        culprit.grad_norm,
        culprit.advantage,
        culprit.log_prob,
        culprit.ratios.current_over_old,
        culprit.coefficients.log_prob,
    ]


def _quoted(text: str | None) -> str | None:
    """Plain words as they are; anything else as a JSON string."""
    if text is None or text.replace("_", "").replace("-", "").isalnum() and not text.startswith("-"):
        return text
    return json.dumps(text)


def to_markdown(run: RunFolder, events: list[Event]) -> str:
    """The events as a page of Markdown to paste into an issue."""
    lines = [f"# {escape(run.name)}", ""]
    lines += [f"> {escape(note)}" for note in run.notes]
    if not events:
        lines += [] if run.metrics.verdicts else ["No spike was localized in this run."]
    for event in events:
        made, text = issue(plain_view(event, run), run)
        lines += ["", made + text]
    return "\n".join(lines).rstrip() + "\n"


FORMATS = {"md": to_markdown, "json": to_json, "csv": to_csv}
