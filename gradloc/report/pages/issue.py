# SPDX-License-Identifier: Apache-2.0
"""An event as Markdown, to paste into an issue: without the run's text unless that is asked for."""

from ...record import Event
from ...words.culprits import carried
from ...words.numbers import bounded, number
from ...words.story import ACTIONS, CERTIFICATES, figures, given
from ...words.text import one_line, span, spoken
from ..runs.run import RunFolder
from .context import context
from .eventview import EventView

CULPRITS = 8
"""Culprits in an issue; the rest are counted."""


def issue(view: EventView, run: RunFolder) -> tuple[str, str]:
    """The event in Markdown.

    Returns:
        The issue, in which tokens are numbers; and the text around the largest culprit as a part that can follow it,
        empty where there is none.
    """
    event, story, found = view.event, view.story, view.event.certificate
    (norm, _, over), *_ = figures(event)
    after = "".join(bounded(found.norm_after, found.error_bound, 3))
    lines = [f"### {escape(story.headline)}", "", escape(story.lede), ""]
    lines += [
        f"- Norm {norm} ({over}), {after} without the culprits: {CERTIFICATES.get(found.verdict, found.verdict)}."
    ]
    lines += [f"- {escape(view.shares)}"] if view.shares else []
    lines += [f"- {escape(given(event, view.clip))}"] if given(event, view.clip) else []
    lines += [f"- Action: {ACTIONS.get(event.action.taken, event.action.taken)}."]
    lines += [f"- Did it hurt? {view.hurt.answer.capitalize()}. {escape(view.hurt.why)}"]
    lines += [f"- Search: {escape(event.search.strategy)}; {view.search_cost}."]
    lines += [f"- {name.capitalize()}: {escape(value)}" for name, value in context(event, run.events)]
    if event.culprits:
        lines += ["", "| tokens | where | share | norm | advantage | ratio | cause |", "|" + " --- |" * 7]
        lines += [_row(event, entry) for entry in view.culprits[:CULPRITS]]
        more = len(event.culprits) - CULPRITS
        lines += ["", f"And {more} more."] if more > 0 else []
    if view.next is not None:
        lines += ["", f"**What to do now:** {escape(view.next.do)} {escape(view.next.why)}", ""]
        lines += _block(view.next.lines)
    if view.replay:
        lines += ["", "Replay:", "", *_block(view.replay)]
    text = f"{story.before}⟦{story.token}⟧{story.after}" if story.token else ""
    fence = "`" * max(3, _longest(text) + 1)
    return "\n".join(
        lines
    ) + "\n", f"\nThe text, the culprit in brackets:\n\n{fence}text\n{text}\n{fence}\n" if text else ""


def _row(event: Event, entry) -> str:
    culprit = entry.culprit
    ids = " ".join(str(token) for token in (culprit.token_ids or ())[:4])
    cells = (
        f"id {ids}" if ids else "–",
        f"rank {number(culprit.rank)}, micro-batch {number(culprit.micro_batch)}, position {span(culprit.positions)}",
        carried(event, [culprit]) or number(None),
        entry.norm,
        number(culprit.advantage),
        number(culprit.ratios.current_over_old),
        escape(spoken(culprit.cause.label)),
    )
    return "| " + " | ".join(cells) + " |"


def _block(lines: dict[str, str]) -> list[str]:
    named = [f"{line}  # {label}" if label else line for label, line in lines.items()]
    return ["```sh", *(line.replace("```", "") for line in named), "```"]


def escape(text: str) -> str:
    """Text that Markdown, and the HTML inside it, takes literally."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|<>~$&@" else c for c in one_line(text))


def _longest(text: str) -> int:
    """The longest run of backticks."""
    return max((len(run) for run in "".join(c if c == "`" else " " for c in text).split()), default=0)
