# SPDX-License-Identifier: Apache-2.0
"""The terminal's view of a run that is going on: norm, threshold, health, the last events."""

import math

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...record import Event
from ...words.leader import leader
from ...words.numbers import bounded, number
from ...words.shares import carried
from ...words.story import headline
from ...words.text import one_line
from ..runs.diagnosis import diagnose
from ..runs.health import RunHealth, judge
from ..runs.metrics import MAX, MEAN, Metrics
from ..runs.run import RunFolder
from .follow import Follower

BARS = "▁▂▃▄▅▆▇█"
EVENTS = 8
"""Events listed: the last ones."""
STYLES = {"healthy": "green", "warning": "yellow", "danger": "bold red"}


def view(follower: Follower, width: int) -> Group:
    """The whole view of what was read last, in so many columns."""
    run = follower.run
    if run is None:
        return Group(Text(f"Waiting: {one_line(follower.waiting)}", style="dim"))
    health = judge(run.metrics)
    parts = [_head(run, health)]
    if run.metrics:
        parts += _curve(run.metrics, run.events, width)
    if health:
        parts += _health(health)
    parts.append(Text())
    parts.append(_events(run.events) if run.events else _without_events(run))
    if run.events:
        parts.append(Text(run.show_command(run.events[-1].event_id), style="cyan"))
    parts += [Text(one_line(note), style="yellow") for note in run.notes[-3:]]
    parts.append(Text("Ctrl-C ends.", style="dim"))
    return Group(*parts)


def news(run: RunFolder, known: set[str]) -> list[str]:
    """A line for each event that is not known yet; they are known then."""
    lines = []
    for event in run.events:
        if event.event_id not in known:
            known.add(event.event_id)
            lines.append(f"{headline(event)}: {_change(event)}")
    return lines


def _head(run: RunFolder, health: RunHealth) -> Text:
    line = Text(one_line(run.name), style="bold")
    if run.metrics:
        line.append(f"  step {run.metrics.steps[-1]:,}", style="not bold")
        norm = _last(run.metrics, MAX) or _last(run.metrics, MEAN)
        line.append(f"  norm {number(norm, 3)}", style="not bold")
    threshold = _last(run.metrics, "gradloc/threshold") if run.metrics else None
    if threshold is None and run.events:
        threshold = run.events[-1].trigger.threshold
    if threshold is not None:
        line.append(f"  threshold {number(threshold, 3)}", style="not bold")
    if health:
        line.append("  ")
        line.append(health.state, style=STYLES[health.state])
    return line


def _last(metrics: Metrics, name: str) -> float | None:
    return next((value for value in reversed(metrics.get(name)) if value is not None), None)


def _curve(metrics: Metrics, events: list[Event], width: int) -> list[Text]:
    """The norm of the last steps as bars on a log scale, and a mark under each step with an event."""
    name = MAX if metrics.finite(MAX) else MEAN
    last = list(zip(metrics.steps, metrics.get(name), strict=True))[-max(width - 2, 10) :]
    known = [math.log(value) for _, value in last if value is not None and 0 < value < math.inf]
    if not known:
        return []
    low, high = min(known), max(known)
    spiked = {event.step.global_step for event in events}
    bars, marks = Text(), Text(style="bold red")
    for step, value in last:
        is_known = value is not None and 0 < value < math.inf
        level = (math.log(value) - low) / (high - low) if is_known and high > low else 0.0
        bars.append(
            BARS[round(level * (len(BARS) - 1))] if is_known else "?", style="red" if step in spiked else "blue"
        )
        marks.append("▲" if step in spiked else " ")
    scale = (
        f"steps {last[0][0]:,} to {last[-1][0]:,}, norm {number(math.exp(low), 3)} to {number(math.exp(high), 3)}, log"
    )
    return [bars, marks, Text(scale, style="dim")]


def _health(health: RunHealth) -> list[Text]:
    """What is wrong at the last step."""
    return [
        Text.assemble((reason.name.replace("_", " "), STYLES[reason.state]), f": {reason.sentence}")
        for reason in health.verdicts[-1].reasons
    ]


def _without_events(run: RunFolder) -> Text:
    """What the log says where GradLoc wrote nothing: it may have been off."""
    if not run.log:
        return Text("No spike so far.", style="green")
    found = diagnose(run.log.runs[0])
    return Text(one_line(found.headline), style="bold red" if found.worst else "green")


def _events(events: list[Event]) -> Table:
    table = Table("step", "what", "token", "share", "norm", "action", box=None, padding=(0, 2, 0, 0))
    for event in events[-EVENTS:]:
        first = leader(event.culprits)
        cells = (
            str(event.step.global_step),
            headline(event),
            f'"{one_line(first.text, 20)}"' if first else "none",
            (carried(event, [first]) if first else None) or number(None),
            _change(event),
            event.action.taken,
        )
        table.add_row(*map(Text, cells))
    return table


def _change(event: Event) -> str:
    after, _ = bounded(event.certificate.norm_after, event.certificate.error_bound, 3)
    return f"{number(event.trigger.grad_norm, 3)} → {after}"
