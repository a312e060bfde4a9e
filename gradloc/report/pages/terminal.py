# SPDX-License-Identifier: Apache-2.0
"""Prints a run to the terminal: its events, or the diagnosis of a log alone.

Tokens are untrusted: text is made visible first and never parsed as rich's markup.
"""

import math
import shlex
import sys
from collections.abc import Iterable, Sequence
from statistics import median

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ...explain.numbers import number
from ...explain.text import in_unit, one_line, plural, plural_of, printable, spoken, times, visible
from ..logs.recording import Metrics
from ..output import say, silence
from ..runs.diagnosis import Diagnosis
from ..runs.events import EventRow, Events
from ..runs.health import TOO_SHORT, judge
from ..runs.overview import HEAD, overview
from ..runs.run import EventGroup, RunFolder
from ..runs.spikes import Judged
from .document import Block, EventDocument, Facts, Fold, Heading, Lines, Section, TokenCell, document
from .document import Table as Cells

HEIGHT = 12
"""Height of the curve, lines."""
NARROWEST, DEFAULT_WIDTH = 20, 80
"""Columns below which a terminal's width is not believed, and those that it then gets."""
EVENTS = 30
"""Most events in the summary, the last ones."""
CULPRITS = 8
"""Most culprits listed per event."""
COURSE_WIDTH = 40
"""Most marks of a metric's course."""
NAME_WIDTH = 22
"""Most letters of a metric's name; of a longer one, the end."""
RUNS = 20
"""Most other runs of a log that are listed."""


class _Printable(Console):
    """Prints no character that controls the terminal, except rich's own colours and cursor."""

    def render(self, renderable, options=None):
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Print nothing more; rich would end with the code 1, which says that something was found."""
        self.quiet = True
        silence()


def console(**options) -> Console:
    """Make a console that prints text unchanged: no markup, no highlighting."""
    made = _Printable(highlight=False, markup=False, emoji=False, **options)
    if made.width < NARROWEST:  # COLUMNS=0, or a terminal without a size, would show nothing
        made.width = DEFAULT_WIDTH
    return made


def table(head: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 2) -> Table:
    """Make a table without lines; columns are ``gap`` blanks apart, and an empty head is not shown."""
    made = Table(*head, box=None, padding=(0, gap, 0, 0), show_header=bool(head))
    for row in rows:
        made.add_row(*row)
    return made


def warn(notes: list[str]) -> None:
    """Print notes to standard error."""
    for note in notes:
        say(note, sys.stderr)


def summary(run: RunFolder, events: Events) -> None:
    """Print a run's events; the whole document of a single event."""
    out, where = console(), shlex.quote(str(run.path))
    out.print(one_line(run.name), style="bold")
    steps: dict[str, str] = {}
    if len(events) == 1:
        story = document(events[0], run)
        _print_head(out, story)
        _print_sections(out, story.sections)
        steps["the page of it, with every token"] = f"{run.show_command(events.rows[0].event_id)} -o event.html"
    else:
        worst = max(range(len(events)), key=lambda at: events.rows[at].severity)
        out.print(f"The worst of {plural(len(events), 'event')}:", style="dim")
        story = document(events[worst], run)
        _print_head(out, story)
        _print_sections(out, [story.section(name) for name in ("hurt", "todo")])
        out.print()
        out.print(event_table(events.rows[-EVENTS:]))
        if len(events) > EVENTS:
            out.print(f"The last {EVENTS} of {len(events):,} events; --list names all.", style="dim")
        if len(run.groups) > 1:
            out.print(_group_table(run.groups))
        steps["the whole report"] = f"gradloc {where} -o report.html"
        steps["the worst event"] = run.show_command(events.rows[worst].event_id)
    if norms := run.metrics.norms:
        out.print(
            f"{len(run.metrics.steps)} steps in {run.metrics.source}: "
            f"median gradient norm {number(median(norms))}, largest {number(max(norms))}."
        )
    _print_next(out, steps)


def _print_next(out: Console, steps: dict[str, str]) -> None:
    if steps:
        out.print("Next:", style="bold")
    for what, command in steps.items():
        out.print(f"  {what}", style="dim")
        out.print(f"    {one_line(command)}", style="cyan", soft_wrap=True)


def _print_head(out: Console, made: EventDocument) -> None:
    out.print(one_line(made.headline), style="bold red")
    out.print(f"{made.title}; {made.verdict}; {made.event.event_id}", style="dim")
    out.print(one_line(made.lede))
    if made.quote is not None:
        before, token, after = made.quote
        out.print(Text.assemble(before, (token, "reverse bold"), after))
    for value, what, remark in made.figures:
        out.print(Text.assemble((f"{value:>12}", "bold"), f"  {what}", (f", {remark}", "dim")))
    if made.named:
        out.print(one_line(made.named))


def _print_sections(out: Console, sections: Sequence[Section]) -> None:
    for section in sections:
        if not section.blocks:
            continue
        out.print()
        out.print(section.title, style="bold")
        for part in section.blocks:
            _print_block(out, part)


def _print_block(out: Console, block: Block) -> None:
    if isinstance(block, str):
        out.print(one_line(block))
    elif isinstance(block, Heading):
        out.print(block.text, style="italic")
    elif isinstance(block, Cells):
        out.print(table(block.head, ([_cell(cell) for cell in row] for row in block.rows[:CULPRITS])))
        if len(block.rows) > CULPRITS:
            out.print(f"And {len(block.rows) - CULPRITS} more.", style="dim")
    elif isinstance(block, Facts):
        for name, text, odd in block.pairs:
            out.print(Text.assemble((f"  {name}: ", "dim"), one_line(text), (f" ({odd})" if odd else "", "red")))
    elif isinstance(block, Lines):
        for label, line in block.lines.items():
            if label:
                out.print(f"  {one_line(label)}", style="dim")
            if line:
                out.print(f"    {one_line(line)}", style="cyan", soft_wrap=True)
    elif isinstance(block, Fold) and block.is_open:
        for part in block.blocks:
            _print_block(out, part)
    elif isinstance(block, Fold) and not block.token:
        out.print(f"  ({block.summary}; see the page, or --format md)", style="dim")


def _cell(cell: str | TokenCell) -> str:
    return f'"{one_line(cell.text, 24)}"' if isinstance(cell, TokenCell) else cell


def event_table(rows: Sequence[EventRow]) -> Table:
    """Make a table with a row per event."""
    made = Table(box=None, padding=(0, 1, 0, 0))
    made.add_column("event", no_wrap=True, overflow="fold")  # --event wants the whole name
    widths = {"norm": 5, "x thresh.": 5, "culprit": 7, "fault": 5, "cause": 9, "certificate": 11}
    for head, width in widths.items():
        made.add_column(head, no_wrap=head == "norm", min_width=width)
    for row in rows:
        more = f" +{row.num_culprits - 1}" if row.num_culprits > 1 else ""
        made.add_row(
            one_line(row.event_id),
            number(row.norm),
            number(times(row.norm, row.threshold), 3),
            f'"{one_line(row.token, 16)}"{more}' if row.num_culprits else "none",
            spoken(row.fault) or "–",
            spoken(row.cause) or "–",
            spoken(row.verdict),
        )
    return made


def _group_table(groups: Sequence[EventGroup]) -> Table:
    """Make a table with a row per kind of event."""
    rows = (
        [spoken(kind) or "–" for kind in (group.fault, group.cause)]
        + [f"{group.count:,}", f"{group.last:,}", one_line(group.worst.event_id)]
        for group in groups
    )
    return table(("fault", "cause", "events", "last at step", "look at"), rows)


def diagnosis(folder: RunFolder) -> None:
    """Print what happened in the worst run of a log, a line per other run, and what to do next."""
    out = console()
    first, *others = folder.diagnoses
    out.print(_head(first), style="bold")
    out.print(visible(first.headline), style="bold red" if first.kind else "")
    if first.label:
        out.print(f"Kind: {first.label}.")
    for sentence in first.sentences[:-1]:
        out.print(visible(sentence))
    health = judge(first.run.parts)
    health.heed(first)
    if first.kind or health.num_unwell or health.is_too_short or not health:  # else health names rows and metrics
        out.print(visible(first.ground), style="dim")
    if first.advice:
        out.print(visible(first.advice))
    if first.command:
        out.print(f"    {visible(first.command)}", style="cyan", soft_wrap=True)
    out.print()
    drawn = curve(first.judged, max(out.width - 12, 20), first.run.metrics)
    for line in drawn:
        out.print(line)
    if drawn:
        out.print()
    _print_overview(out, first.run.metrics, bool(first.run.overwritten))
    is_said = health and (health.is_too_short if first.headline.startswith(TOO_SHORT) else health.is_finite_alone)
    if health and not is_said and (health.num_unwell or not first.kind):  # what saw nothing contradicts no kind
        out.print(f"Health: {health.headline}")
        for verdict in health.firsts:
            reason = verdict.reasons[0]
            if reason.name == "gradient_jump" and first.worst and verdict.step == first.worst.peak.step:
                continue  # the headline says it
            out.print(f"  {reason.name}, {health.unit} {verdict.step}: {reason.sentence}", style="dim")
    for note in first.limits:
        out.print(visible(note), style="yellow")
    if others:
        out.print()
        out.print(f"{plural(len(others), 'other run')}:", style="bold")
    for other in others[:RUNS]:
        said = visible(other.headline)
        out.print(f"  {said}" if said.startswith(one_line(other.run.name)) else f"  {one_line(other.run.name)}: {said}")
    if len(others) > RUNS:
        out.print(f"  And {len(others) - RUNS} more.", style="dim")
    where = shlex.join(folder.named)
    if str(folder.path) != "-" and not folder.path.is_fifo():
        steps = {"step by step, with what people do about it": f"gradloc health {where}"} if health else {}
        if any(first.judged):
            steps["other settings of the trigger"] = f"gradloc trigger {where} --set cap=6"
        if any(finding.worst.name.startswith("mismatch") for finding in health.findings):
            steps["how far rollout engine and trainer differ"] = f"gradloc mismatch {where}"
        steps["the page"] = f"gradloc {where} -o page.html"
        _print_next(out, steps)


def _print_overview(out: Console, metrics: Metrics, is_surviving: bool) -> None:
    """Print what the main metrics did; ``is_surviving``: without what a resume overwrote."""
    courses = overview(metrics)
    if not courses:
        return
    rows = [(one_line(name, NAME_WIDTH, keep="end"), *others) for name, *others in (each.numbers for each in courses)]
    taken = sum(max(map(len, column)) + 1 for column in zip(HEAD[:-1], *rows, strict=True))
    width = min(max(out.width - taken - 1, len(HEAD[-1])), COURSE_WIDTH)
    drawn = ((*row, course.bars(width)) for row, course in zip(rows, courses, strict=True))
    out.print(table(HEAD, drawn, gap=1))
    if is_surviving:
        out.print("Each step as it was logged last.", style="dim")


def _head(first: Diagnosis) -> str:
    run = first.run
    parts = [f"{plural_of(run.unit)} {segment.first:,} to {segment.last:,}" for segment in run.segments]
    spans = ", then ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    metrics, rows = len(run.parts[0].own_names), sum(len(part.steps) for part in run.parts)
    read = f"; {run.receipt}" if run.receipt else ""
    return f"{one_line(run.name)} ({run.format}): {spans}, {plural(metrics, 'metric')}, {plural(rows, 'row')}{read}"


def curve(segments: Sequence[Sequence[Judged]], width: int, metrics: Metrics) -> list[Text]:
    """Plot each column's largest norm and lowest threshold on a log scale, with round steps below.

    Segments share the axis of steps; steps that a later one logged again are drawn as overwritten.
    """
    every = [step for steps in segments for step in steps]
    latest = {step.step: id(step) for step in every}
    judged = sorted(every, key=lambda step: step.step)
    size = math.ceil(len(judged) / width)
    columns = [judged[start : start + size] for start in range(0, len(judged), size or 1)]
    tops = [_largest(column) for column in columns]
    norms = [None if top is None else math.log(top.norm) for top in tops]
    limits = [min((math.log(step.threshold) for step in column if step.threshold), default=None) for column in columns]
    known = [value for value in [*norms, *limits] if value is not None and math.isfinite(value)]
    if not known or len(judged) < 2:
        return []
    low, high = min(known), max(known)
    lines = [Text() for _ in range(HEIGHT)]
    has_overwritten = False
    for column, top, norm, limit in zip(columns, tops, norms, limits, strict=True):
        is_spike = any(step.stands_out for step in column)
        is_overwritten = top is not None and latest[top.step] != id(top)
        has_overwritten = has_overwritten or is_overwritten
        norm_level, limit_level = _level(norm, low, high), _level(limit, low, high)
        if norm is None and is_spike:
            norm_level = HEIGHT - 1  # not finite
        full, hollow, style = ("◆", "◇", "bold red") if is_spike else ("•", "∘", "blue")
        for level, line in enumerate(reversed(lines)):
            if level == norm_level:
                line.append(hollow if is_overwritten else full, style=style)
            else:
                line.append("-" if level == limit_level else " ", style="dim")
    for level, line in enumerate(reversed(lines)):
        if level in (0, HEIGHT // 2, HEIGHT - 1):
            line.append(f" {number(math.exp(low + (high - low) * level / (HEIGHT - 1)), 3)}", style="dim")
    legend = f"{plural_of(metrics.unit)} {judged[0].step:,} to {judged[-1].step:,}: "
    legend += f"• {metrics.own_norm}, last {number(judged[-1].norm, 3)}"
    legend += "; ◆ flagged" * any(step.stands_out for step in judged)
    legend += ", - threshold" * any(step.threshold for step in judged)
    if has_overwritten:
        legend += ", ◇ ∘ overwritten"
    if size > 1:
        legend += in_unit(f"; {size} steps a column", metrics.unit)
    return [*lines, Text(_ticks(columns), style="dim"), Text(legend, style="dim")]


def _largest(column: Sequence[Judged]) -> Judged | None:
    """Return the step with the largest norm that is finite and above 0; None without one."""
    return max((step for step in column if 0 < step.norm < math.inf), key=lambda step: step.norm, default=None)


def _ticks(columns: Sequence[Sequence[Judged]]) -> str:
    """Write round steps below their columns, at least twelve columns apart."""
    least = 12 * (columns[-1][-1].step - columns[0][0].step) / len(columns)
    unit = next(size * 10**power for power in range(30) for size in (1, 2, 5) if size * 10**power >= least)
    line = ""
    for index, column in enumerate(columns):
        tick = column[-1].step // unit * unit
        if tick >= column[0].step and index >= len(line):
            line = f"{line.ljust(index)}|{tick:,} "
    return line


def _level(value: float | None, low: float, high: float) -> int | None:
    """Return the line of a value, from 0 at the bottom; None where it is not known or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return round((HEIGHT - 1) * (value - low) / (high - low)) if high > low else 0
