# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows of a run: its events, or where there is a log alone, the diagnosis.

Tokens are hostile here, too: text is made visible first, and never read as rich's markup.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ...record import Event
from ...words.culprits import carried, leader
from ...words.numbers import number
from ...words.story import cause_of
from ...words.text import one_line, plural, printable, span, spoken, times, visible
from ..output import say
from ..runs.diagnosis import Diagnosis, diagnose
from ..runs.health import judge
from ..runs.run import RunFolder
from ..runs.spikes import Judged
from .eventview import EventView, severity

HEIGHT = 12
"""Lines of the curve."""
EVENTS = 30
"""Events listed in the summary: the last ones."""
CULPRITS = 8
"""Culprits listed per event."""
RUNS = 20
"""Runs of a log with a line each, after the worst one."""


class _Printable(Console):
    """No character of what is printed can command the terminal; colours and the cursor are rich's own."""

    def render(self, renderable, options=None):
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(**options) -> Console:
    """Prints text as it is: no markup, no colours of its own."""
    return _Printable(highlight=False, markup=False, emoji=False, **options)


def warn(notes: list[str]) -> None:
    """Prints what could not be read to standard error."""
    for note in notes:
        say(note, sys.stderr)


def summary(run: RunFolder, events: list[Event]) -> None:
    """Prints a run's events; of one event alone, its culprits with their numbers as well."""
    out, where = console(), shlex.quote(str(run.path))
    out.print(one_line(run.name), style="bold")
    steps: dict[str, str] = {}
    if len(events) == 1:
        view = EventView(events[0], run)
        _print_event(out, view)
        if do := view.next:
            steps = {f"{do.do} ({label})" if label else do.do: line for label, line in do.lines.items()} | do.meanwhile
        steps["the page of it, with every token"] = f"{run.show_command(events[0].event_id)} -o event.html"
        if view.replay:
            steps["the event again, on one machine"] = view.replay
    elif events:
        out.print(event_table(events[-EVENTS:]))
        if len(events) > EVENTS:
            out.print(f"The last {EVENTS} of {len(events)} events; --list names all.", style="dim")
        steps["the whole report"] = f"gradloc-report {where} -o report.html"
        steps["the worst event"] = run.show_command(max(events, key=severity).event_id)
    elif run.metrics:
        steps["was the run well?"] = f"gradloc-report health {where}"
    if norms := run.metrics.norms:
        out.print(
            f"{len(run.metrics.steps)} steps in {run.metrics.source}: "
            f"median gradient norm {number(median(norms))}, largest {number(max(norms))}."
        )
    for note in run.notes:
        out.print(visible(note), style="yellow")
    _print_next(out, steps)


def _print_next(out: Console, steps: dict[str, str]) -> None:
    if steps:
        out.print("Next:", style="bold")
    for what, command in steps.items():
        out.print(f"  {what}", style="dim")
        out.print(f"    {one_line(command)}", style="cyan", soft_wrap=True)


def _print_event(out: Console, view: EventView) -> None:
    out.print(view.verdict)
    out.print(event_table([view.event]))
    heads = ("token", "rank, micro-batch, position", "share", "norm", "advantage", "ratio", "cause")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for entry in view.culprits[:CULPRITS]:
        culprit = entry.culprit
        where = f"{number(culprit.rank)}, {number(culprit.micro_batch)}, {span(culprit.positions)}"
        table.add_row(f'"{one_line(culprit.text, 24)}"', where, *entry.cells)
    if view.culprits:
        out.print(table)
    for sentence in (view.fault if view.event.culprits else "", view.before, view.shares):
        if sentence:
            out.print(sentence, style="dim")
    if view.tried:
        out.print(f"Tried, and no help: {' '.join(view.tried)}", style="dim")
    if len(view.event.culprits) > CULPRITS:
        out.print(f"And {len(view.event.culprits) - CULPRITS} more culprits.", style="dim")


def event_table(events: list[Event]) -> Table:
    """A line for each event."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("event", no_wrap=True, overflow="fold")  # --event wants the whole name
    widths = {"norm": 5, "x thresh.": 5, "culprit": 7, "share": 5, "cause": 9, "certificate": 11}
    for head, width in widths.items():
        table.add_column(head, no_wrap=head in ("norm", "share"), min_width=width)
    for event in events:
        first = leader(event.culprits)
        more = f" +{len(event.culprits) - 1}" if len(event.culprits) > 1 else ""
        table.add_row(
            one_line(event.event_id),
            number(event.trigger.grad_norm),
            number(times(event.trigger.grad_norm, event.trigger.threshold), 3),
            f'"{one_line(first.text, 16)}"{more}' if first else "none",
            (carried(event, [first]) if first else None) or number(None),
            spoken(cause_of(event)) or "–",
            spoken(event.certificate.verdict),
        )
    return table


def diagnosis(folder: RunFolder) -> None:
    """Prints what happened in the worst run of a log, a line for each other one, and what to do next."""
    out = console()
    first, *others = [diagnose(run) for run in folder.runs]
    out.print(_head(first), style="bold")
    out.print(visible(first.headline), style="bold red" if first.kind else "")
    if first.label:
        out.print(f"Kind: {first.label}.")
    for sentence in first.sentences:
        out.print(visible(sentence))
    if first.command:
        out.print(f"    {visible(first.command)}", style="cyan", soft_wrap=True)
    out.print()
    for line in curve(first.judged, max(out.width - 12, 20), first.run.metrics.own_norm):
        out.print(line)
    health = judge(first.run.parts)
    if health and (health.num_unwell or not first.kind):  # rules that saw nothing do not contradict the kind
        out.print(f"Health: {health.headline}")
        for finding in health.findings[:1]:
            out.print(f"  {finding.worst.name}, step {finding.worst_step}: {finding.worst.sentence}", style="dim")
    out.print(visible(first.ground), style="dim")
    for note in [*first.limits, *folder.notes]:
        out.print(visible(note), style="yellow")
    if others:
        out.print()
        out.print(f"{plural(len(others), 'other run')}:", style="bold")
    for other in others[:RUNS]:
        out.print(f"  {one_line(other.run.name)}: {visible(other.headline)}")
    if len(others) > RUNS:
        out.print(f"  And {len(others) - RUNS} more.", style="dim")
    where = shlex.join(folder.named)
    if str(folder.path) != "-" and not folder.path.is_fifo():
        steps = {"step by step, with what people do about it": f"gradloc-report health {where}"} if health else {}
        if any(first.judged):
            steps["other settings of the trigger"] = f"gradloc-report trigger {where} --set cap=6"
        steps |= {
            "the page": f"gradloc-report {where} -o page.html",
        }
        _print_next(out, steps)


def _head(first: Diagnosis) -> str:
    run = first.run
    parts = [f"steps {segment.first:,} to {segment.last:,}" for segment in run.segments]
    spans = ", then ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    metrics, rows = len(run.parts[0].own_names), sum(len(part.steps) for part in run.parts)
    read = f"; {run.receipt}" if run.receipt else ""
    return f"{one_line(run.name)} ({run.format}): {spans}, {plural(metrics, 'metric')}, {plural(rows, 'row')}{read}"


def curve(segments: Sequence[Sequence[Judged]], width: int, name: str = "norm") -> list[Text]:
    """The largest norm of each column's steps, and the lowest threshold over it, on a log scale; round steps below.

    Segments share the axis of steps; what a later one logged again is drawn as overwritten.
    """
    latest = {step.step: id(step) for steps in segments for step in steps}
    judged = sorted((step for steps in segments for step in steps), key=lambda step: step.step)
    size = -(-len(judged) // width)
    columns = [judged[at : at + size] for at in range(0, len(judged), size or 1)]
    tops = [max((j for j in column if 0 < j.norm < math.inf), key=lambda j: j.norm, default=None) for column in columns]
    norms = [None if top is None else math.log(top.norm) for top in tops]
    limits = [min((math.log(j.threshold) for j in column if j.threshold), default=None) for column in columns]
    known = [value for value in [*norms, *limits] if value is not None and math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    lines = [Text() for _ in range(HEIGHT)]
    has_lost = False
    for column, top, norm, limit in zip(columns, tops, norms, limits, strict=True):
        is_spike = any(j.stands_out for j in column)
        is_lost = top is not None and latest[top.step] != id(top)
        has_lost = has_lost or is_lost
        at, over = _level(norm, low, high), _level(limit, low, high)
        if norm is None and is_spike:
            at = HEIGHT - 1  # not finite
        mark = ("◇" if is_lost else "◆") if is_spike else "∘" if is_lost else "•"
        for level, line in enumerate(reversed(lines)):
            if level == at:
                line.append(mark, style="bold red" if is_spike else "blue")
            else:
                line.append("-" if level == over else " ", style="dim")
    for level, line in enumerate(reversed(lines)):
        if level in (0, HEIGHT // 2, HEIGHT - 1):
            line.append(f" {number(math.exp(low + (high - low) * level / (HEIGHT - 1)), 3)}", style="dim")
    legend = f"steps {judged[0].step:,} to {judged[-1].step:,}: • {name}, last {number(judged[-1].norm, 3)}"
    legend += "; ◆ flagged, - threshold"
    legend += ", ◇ ∘ overwritten" * has_lost + f"; {size} steps a column" * (size > 1)
    return [*lines, Text(_ticks(columns), style="dim"), Text(legend, style="dim")]


def _ticks(columns: Sequence[Sequence[Judged]]) -> str:
    """Round steps below their columns, a dozen columns or more apart."""
    least = 12 * (columns[-1][-1].step - columns[0][0].step) / len(columns)
    unit = next(size * 10**power for power in range(30) for size in (1, 2, 5) if size * 10**power >= least)
    line = ""
    for at, column in enumerate(columns):
        tick = column[-1].step // unit * unit
        if tick >= column[0].step and at >= len(line):
            line = f"{line.ljust(at)}|{tick:,} "
    return line


def _level(value: float | None, low: float, high: float) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return round((HEIGHT - 1) * (value - low) / (high - low)) if high > low else 0
