# SPDX-License-Identifier: Apache-2.0
"""Writes a run's events as Markdown for an issue. Tokens are numbers, and their text is a separate part."""

import re

from ...explain.text import one_line, printable
from ...record import Event
from ..runs.run import RunFolder
from .document import Block, EventDocument, Facts, Heading, Lines, Table, TokenCell, document


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
        return [
            "\n".join(
                f"- {escape(name)}: {escape(f'{text} ({odd})' if odd else text)}" for name, text, odd in block.pairs
            )
        ]
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
