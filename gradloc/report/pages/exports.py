# SPDX-License-Identifier: Apache-2.0
"""A run's events as Markdown, JSON and CSV: for an issue, a script, a spreadsheet."""

import csv
import io
import json
from typing import Any

from ...record import Culprit, Event
from ...record.store import plain
from ...words.numbers import bounded, number
from ...words.shares import told_share
from ..runs.run import RunFolder
from ..runs.story import cause_of
from ..text import one_line, spoken
from .eventview import ACTIONS, CERTIFICATES, describe, plain_view

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
        lines += _event_lines(run, event)
    return "\n".join(lines).rstrip() + "\n"


def _event_lines(run: RunFolder, event: Event) -> list[str]:
    view = plain_view(event, run.events_root or run.path)
    lines = ["", f"## {escape(view.title)} ({escape(event.event_id)})", ""]
    if view.verdict:
        lines += [escape(view.verdict), ""]
    lines += [
        "| token | where | share | norm | advantage | ratio | cause |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for culprit in event.culprits:
        entry = describe(event, culprit)
        cells = (
            code(entry.token),
            entry.place,
            entry.share,
            entry.norm,
            number(culprit.advantage),
            number(culprit.ratios.current_over_old),
            escape(spoken(culprit.cause.label)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    certificate = event.certificate
    after = "".join(bounded(certificate.norm_after, certificate.error_bound))
    lines += [
        "",
        f"- Norm {number(certificate.norm_before)} with the culprits, "
        f"{after} without, threshold {number(certificate.threshold)}: "
        f"{escape(CERTIFICATES.get(certificate.verdict, certificate.verdict))}.",
        *([f"- {escape(view.shares)}"] if view.shares else []),
        f"- Action: {escape(ACTIONS.get(event.action.taken, event.action.taken))}.",
        f"- Search: {escape(event.search.strategy)}; {view.search_cost}.",
    ]
    lines += [f"- {advice.title}: {what} `{line}`" for advice, _ in view.causes for what, line in advice.advice]
    if view.replay:
        lines += ["", "```sh", view.replay.replace("```", ""), "```"]
    return lines


def escape(text: str) -> str:
    """Text that Markdown, and the HTML inside it, takes literally."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|<>~$&@" else c for c in one_line(text))


def code(text: str) -> str:
    """A code span that holds any text: fenced by more backticks than stand inside."""
    shown = one_line(text).replace("|", "\\|")
    longest = max((len(run) for run in "".join(c if c == "`" else " " for c in shown).split()), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}"


FORMATS = {"md": to_markdown, "json": to_json, "csv": to_csv}
