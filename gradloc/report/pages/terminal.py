# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows: a summary in tables, and notes.

Tokens are hostile here, too: text is made visible first, and never read as rich's markup.
"""

import shlex
import sys
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...record import Event
from ...words.culprits import carried, shares_sentence
from ...words.numbers import number
from ...words.story import cause_of
from ...words.text import one_line, span, spoken, times, visible
from ...words.verdict import verdict_sentences
from ..runs.run import RunFolder
from .eventview import plain_view, severity

EVENTS = 30
"""Events listed in the summary: the last ones."""
CULPRITS = 8
"""Culprits listed per event."""


def summary(run: RunFolder, events: list[Event]) -> None:
    """Print a run's events; of one event alone, its culprits with their numbers as well."""
    console = Console(highlight=False)
    console.print(Text(one_line(run.name), style="bold"))
    if len(events) == 1:
        _one(console, events[0])
    elif events:
        console.print(_table(events[-EVENTS:]))
        if len(events) > EVENTS:
            console.print(Text(f"The last {EVENTS} of {len(events)} events; --list names all.", style="dim"))
    if norms := run.metrics.norms:
        console.print(
            f"{len(run.metrics.steps)} steps in {run.metrics.source}: "
            f"median gradient norm {number(median(norms))}, largest {number(max(norms))}."
        )
    for note in run.notes:
        console.print(Text(visible(note), style="yellow"))
    _next(console, run, events)


def _next(console: Console, run: RunFolder, events: list[Event]) -> None:
    """What one does after reading the summary: the action, then the commands that show more."""
    where = shlex.quote(str(run.path))
    if not events:
        steps = [("was the run well?", f"gradloc-report health {where}")] if run.metrics else []
    elif len(events) == 1:
        found = plain_view(events[0], run)
        steps = [
            (_labelled(found.next.do, label), line) for label, line in (found.next.lines if found.next else {}).items()
        ]
        steps.append(("the page of it, with every token", f"{run.show_command(events[0].event_id)} -o event.html"))
        steps += [(_labelled("the event again, on one machine", label), line) for label, line in found.replay.items()]
    else:
        worst = max(events, key=severity)
        steps = [
            ("the whole report", f"gradloc-report {where} -o report.html"),
            ("the worst event", run.show_command(worst.event_id)),
        ]
    next_steps(console, steps)


def next_steps(console: Console, steps: list[tuple[str, str]]) -> None:
    """What one does next: pairs of what, and the command."""
    if steps:
        console.print(Text("Next:", style="bold"))
    for what, command in steps:
        console.print(Text(f"  {what}", style="dim"))
        console.print(Text(f"    {one_line(command)}", style="cyan"), soft_wrap=True)


def _labelled(what: str, label: str) -> str:
    return f"{what} ({label})" if label else what


def warn(notes: list[str]) -> None:
    """Print what could not be read to standard error."""
    for note in notes:
        print(visible(note), file=sys.stderr)


def _one(console: Console, event: Event) -> None:
    console.print(Text(verdict_sentences(event)))
    console.print(_table([event]))
    table = Table(
        "token",
        "rank, micro-batch, position",
        "share",
        "norm",
        "advantage",
        "ratio",
        "cause",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for culprit in event.culprits[:CULPRITS]:
        where = f"{number(culprit.rank)}, {number(culprit.micro_batch)}, {span(culprit.positions)}"
        cells = (
            f'"{one_line(culprit.text, 24)}"',
            where,
            carried(event, [culprit]) or number(None),
            ("" if culprit.is_exact else "≥ ") + number(culprit.grad_norm),
            number(culprit.advantage),
            number(culprit.ratios.current_over_old),
            spoken(culprit.cause.label),
        )
        table.add_row(*map(Text, cells))
    if event.culprits:
        console.print(table)
    if event.shares is not None:
        console.print(Text(shares_sentence(event), style="dim"))
    if len(event.culprits) > CULPRITS:
        console.print(Text(f"And {len(event.culprits) - CULPRITS} more culprits.", style="dim"))


def _table(events: list[Event]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("event", no_wrap=True, overflow="fold")  # --event wants the whole name
    widths = {"norm": 5, "x thresh.": 5, "culprit": 7, "share": 5, "cause": 9, "certificate": 11}
    for head, width in widths.items():
        table.add_column(head, no_wrap=head in ("norm", "share"), min_width=width)
    for event in events:
        first = event.culprits[0] if event.culprits else None
        token = f'"{one_line(first.text, 16)}"' if first else "none"
        more = f" +{len(event.culprits) - 1}" if len(event.culprits) > 1 else ""
        cells = (
            one_line(event.event_id),
            number(event.trigger.grad_norm),
            number(times(event.trigger.grad_norm, event.trigger.threshold), 3),
            token + more,
            (carried(event, [first]) if first else None) or number(None),
            spoken(cause_of(event)) or "–",
            spoken(event.certificate.verdict),
        )
        table.add_row(*map(Text, cells))
    return table
