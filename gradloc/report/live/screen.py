# SPDX-License-Identifier: Apache-2.0
"""The terminal's view of a run that is going on: norm, threshold, health, the last events."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...record import Event
from ...words.culprits import carried, leader
from ...words.numbers import bounded, number
from ...words.story import headline
from ...words.text import one_line
from ..pages.charts import THRESHOLD
from ..pages.curve import curve
from ..runs.diagnosis import diagnose
from ..runs.health import RunHealth, judge
from ..runs.metrics import MAX, MEAN, Metrics
from ..runs.run import RunFolder
from ..runs.trigger import Judged
from .follow import Follower

EVENTS = 8
"""Events listed: the last ones."""
STYLES = {"healthy": "green", "warning": "yellow", "danger": "bold red"}


def view(follower: Follower, width: int) -> Group:
    """The whole view.

    Args:
        follower: what was read last.
        width: columns of the terminal.
    """
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
    threshold = _last(run.metrics, THRESHOLD) if run.metrics else None
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
    """Norm and threshold of the last steps, those with an event marked."""
    spiked, room = {event.step.global_step for event in events}, max(width - 12, 20)
    logged = zip(metrics.steps, metrics.get(metrics.norm or MEAN), metrics.get(THRESHOLD), strict=True)
    judged = [Judged(step, norm, limit, step in spiked) for step, norm, limit in logged if norm is not None]
    return curve([judged[-room:]], room)


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
