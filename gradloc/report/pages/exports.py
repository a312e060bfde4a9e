# SPDX-License-Identifier: Apache-2.0
"""A run's events as Markdown, JSON and CSV: for an issue, a script, a spreadsheet."""

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

from ...record import Culprit, Event
from ...record.store import plain
from ...words.culprits import trusted_share
from ...words.cures import healer
from ...words.numbers import bounded
from ...words.story import cause_of, figures, given
from ...words.text import one_line, printable
from ..runs.diagnosis import diagnose
from ..runs.run import RunFolder
from .eventview import EventView

CULPRITS = 8
"""Culprits in an issue; the rest are counted."""
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
    "advantage": lambda _, culprit: culprit.advantage,
    "log_prob": lambda _, culprit: culprit.log_prob,
    "ratio": lambda _, culprit: culprit.ratios.current_over_old,
    "coefficient": lambda _, culprit: culprit.coefficients.log_prob,
}


def to_json(run: RunFolder, events: list[Event]) -> str:
    """The events' records, of logs alone what happened in each run, and what was noted while reading; non-finite
    numbers are spelled out."""
    document: dict[str, Any] = {"run": run.name, "notes": run.notes, "events": events}
    if run.events_root is None:
        document["diagnoses"] = [
            {
                "run": d.run.name,
                "judged": d.is_judged,
                "kind": d.kind,
                "headline": d.headline,
                "sentences": d.sentences,
                "command": d.command,
                "ground": d.ground,
                "limits": d.limits,
            }
            for d in map(diagnose, run.runs)
        ]
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def to_csv(run: RunFolder, events: list[Event]) -> str:
    """One line per culprit; an event without culprits has one line with those columns empty but its cause.

    Tokens and names are JSON strings: their quotes keep a spreadsheet from running ``=...`` as a
    formula.
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
    """Plain words as they are; anything else as a JSON string."""
    if text is None or text.replace("_", "").replace("-", "").isalnum() and not text.startswith("-"):
        return text
    return json.dumps(text)


def to_markdown(run: RunFolder, events: list[Event]) -> str:
    """The events as a page of Markdown to paste into an issue."""
    lines = [f"# {escape(run.name)}", ""]
    lines += [f"> {escape(note)}" for note in run.notes]
    for said in map(diagnose, run.runs) if run.events_root is None else ():
        lines += ["", f"### {escape(said.run.name)}: {escape(said.headline)}", ""]
        lines += [f"- {escape(sentence)}" for sentence in said.sentences]
        lines += ["", *_block({"": said.command})] if said.command else []
    if run.events_root is not None and not events and not run.metrics.verdicts:
        lines.append("No spike was localized in this run.")
    for event in events:
        numbers, text = issue(EventView(event, run))
        lines += ["", numbers + text]
    return printable("\n".join(lines).rstrip()) + "\n"


def issue(view: EventView) -> tuple[str, str]:
    """The event in Markdown.

    Returns:
        The issue, in which tokens are numbers; and the text around the largest culprit as a part that can follow it,
        empty where there is none.
    """
    event, story, certificate = view.event, view.story, view.event.certificate
    (norm, _, over), *_ = figures(event)
    after = "".join(bounded(certificate.norm_after, certificate.error_bound, 3))
    lines = [f"### {escape(story.headline)}", "", escape(story.lede), ""]
    lines += [f"- Norm {norm} ({over}), {after} without the culprits: {view.certificate}."]
    sentences = (view.fault, view.before, view.shares, given(event, view.clip))
    lines += [f"- {escape(sentence)}" for sentence in sentences if sentence]
    lines += [f"- Action: {view.action}."]
    lines += [f"- Did it hurt? {view.hurt.answer.capitalize()}. {escape(view.hurt.why)}"]
    lines += [f"- Search: {escape(event.search.strategy)}; {view.search_cost}."]
    lines += [f"- {name.capitalize()}: {escape(value)}" for name, value in view.context]
    if event.culprits:
        lines += ["", "| tokens | where | share | norm | advantage | ratio | cause |", "|" + " --- |" * 7]
        for entry in view.culprits[:CULPRITS]:
            ids = " ".join(str(token) for token in (entry.culprit.token_ids or ())[:4])
            *numbers, cause = entry.cells
            cells = [f"id {ids}" if ids else "–", entry.place, *numbers, escape(cause)]
            lines.append("| " + " | ".join(cells) + " |")
        more = len(event.culprits) - CULPRITS
        lines += ["", f"And {more} more."] if more > 0 else []
    if view.next is not None:
        lines += ["", f"**What to do now:** {escape(view.next.do)} {escape(view.next.why)}", ""]
        lines += _block(view.next.lines)
        for do, line in view.next.meanwhile.items():
            lines += ["", escape(do), "", *_block({"": line})]
    lines += ["", f"Tried, and no help: {escape(' '.join(view.tried))}"] if view.tried else []
    if view.replay:
        lines += ["", "Replay:", "", *_block({"": view.replay})]
    text = ""
    if story.token:
        text = f"{story.before}⟦{story.token}⟧{story.after}"
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
        text = f"\nThe text, the culprit in brackets:\n\n{fence}text\n{text}\n{fence}\n"
    return "\n".join(lines) + "\n", text


def _block(lines: dict[str, str]) -> list[str]:
    named = [f"{line}  # {label}" if label else line for label, line in lines.items()]
    return ["```sh", *(line.replace("```", "") for line in named), "```"]


def escape(text: str) -> str:
    """Text that Markdown, and the HTML inside it, takes literally."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|<>~$&@" else c for c in one_line(text))


FORMATS = {"md": to_markdown, "json": to_json, "csv": to_csv}
