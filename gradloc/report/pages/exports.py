# SPDX-License-Identifier: Apache-2.0
"""Exports a run's events as JSON, as CSV, or as Markdown for an issue, in which a token's text is a separate part."""

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

from ...explain.culprits import trusted_share
from ...explain.cures import healer
from ...explain.story import cause_of
from ...explain.text import one_line, printable
from ...record import Culprit, Event
from ...record.columns import OF_A_TOKEN
from ..output import as_json
from ..runs.overview import overview
from ..runs.run import RunFolder
from .document import Block, EventDocument, Facts, Heading, Lines, Table, TokenCell, course_table, document

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
            | {"metrics": [course.facts() for course in overview(found.run.metrics)]}
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


def to_markdown(run: RunFolder, events: list[Event]) -> str:
    """Write the events as Markdown to paste into an issue."""
    lines = [f"# {escape(run.name)}", ""]
    lines += [f"> {escape(note)}" for note in run.notes]
    for said in () if run.events else run.diagnoses:
        lines += ["", f"### {escape(said.run.name)}: {escape(said.headline)}", ""]
        kind = [f"Kind: {said.label}."] if said.label else []
        found = [*kind, *said.sentences[:-1], said.ground, *said.sentences[-1:]]
        lines += [f"- {escape(sentence)}" for sentence in found]
        lines += ["", *_lines({"": said.command})] if said.command else []
        courses = course_table(said.run.metrics)
        lines += ["", *paragraphs(courses)] if courses.rows else []
    for event in events:
        lines += ["", "".join(issue(document(event, run)))]
    return printable("\n".join(lines).rstrip()) + "\n"


def issue(made: EventDocument) -> tuple[str, str]:
    """Lay an event out as Markdown.

    Returns:
        The issue, in which tokens are numbers; and the text around the largest culprit as a part that can follow it,
        empty where there is none.
    """
    parts = [f"### {escape(made.headline)}", escape(made.lede)]
    parts.append("\n".join(f"- {escape(f'{what}: {value} ({remark})')}" for value, what, remark in made.figures))
    parts.append(escape(made.named))
    for section in made.sections:
        parts.append(f"**{escape(section.title)}**")
        for block in section.blocks:
            parts += paragraphs(block)
    text = ""
    if made.quote is not None:
        before, token, after = made.quote
        text = f"{before}⟦{token}⟧{after}"
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
        text = f"\nThe text, the culprit in brackets:\n\n{fence}text\n{text}\n{fence}\n"
    return "\n\n".join(filter(None, parts)) + "\n", text


def paragraphs(block: Block) -> list[str]:
    """Return the paragraphs of a block."""
    if isinstance(block, str):
        return [escape(block)]
    if isinstance(block, Heading):
        return [f"#### {escape(block.text)}"]
    if isinstance(block, Table):
        rows = [[_cell(cell) for cell in row] for row in (block.head, ("---",) * len(block.head), *block.rows)]
        return ["\n".join(f"| {' | '.join(row)} |" for row in rows)]
    if isinstance(block, Facts):
        pairs = ((name, f"{text} ({odd})" if odd else text) for name, text, odd in block.pairs)
        return ["\n".join(f"- {escape(name)}: {escape(text)}" for name, text in pairs)]
    if isinstance(block, Lines):
        return ["\n".join(_lines(block.lines))]
    inner = [part for each in block.blocks for part in paragraphs(each)]
    token = f"{_cell(block.token)}, " if block.token else ""
    return [f"<details><summary>{token}{escape(block.summary)}</summary>", *inner, "</details>"]


def _cell(cell: str | TokenCell) -> str:
    if isinstance(cell, TokenCell):
        ids = " ".join(str(token) for token in cell.ids[:4])
        return f"id {ids}" if ids else "–"
    return cell if cell == "---" else escape(cell)


def _lines(lines: dict[str, str]) -> list[str]:
    found = []
    for label, line in lines.items():
        if label:
            found += [escape(label), ""]
        if line:
            found += ["```sh", line.replace("```", ""), "```", ""]
    return found[:-1]


def escape(text: str) -> str:
    """Escape text for Markdown and the HTML in it."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|<>~$&@" else c for c in one_line(text))


FORMATS = {"md": to_markdown, "json": to_json, "csv": to_csv}
