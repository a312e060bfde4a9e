# SPDX-License-Identifier: Apache-2.0
"""Reads a run again whenever its files change, and shows it in the terminal: norm, threshold, health, last events."""

from pathlib import Path

from rich.console import Group
from rich.text import Text

from ...record import Event
from ...words.numbers import bounded, number
from ...words.story import headline
from ...words.text import one_line
from ..errors import ReportError
from ..logs import files_of
from ..pages.script_data import THRESHOLD
from ..pages.terminal import curve, event_table
from ..runs.diagnosis import diagnose
from ..runs.health import RunHealth, judge
from ..runs.metrics import MEAN
from ..runs.run import RunFolder, read_run
from ..runs.trigger import Judged

EVENTS = 8
"""Events listed: the last ones."""
STYLES = {"healthy": "green", "warning": "yellow", "danger": "bold red"}


class Follower:
    """A run's folder as it is at the moment."""

    def __init__(self, path: Path, metrics_path: Path | None = None):
        self.path = path
        self.version = 0
        """Counts how often something new was read."""
        self.run: RunFolder | None = None
        """None until there is an event or a metric."""
        self.waiting = f"{path} is not there yet."
        """Why there is nothing to show, in a sentence."""
        self._metrics_path = metrics_path
        self._seen: list[tuple[Path, int, int]] | None = None

    def poll(self) -> bool:
        """Reads the run if a file of it has changed; returns whether there is something new to show."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self.run = read_run(self.path, self._metrics_path)
        except (ReportError, OSError) as error:  # an empty folder, or a file that just went away
            self.waiting = str(error)
            return False
        self.version += 1
        return True

    def _stamps(self) -> list[tuple[Path, int, int]]:
        stamps = []
        for file in [*files_of(self.path, depth=3), self.path, *filter(None, [self._metrics_path])]:
            try:
                status = file.stat()
            except OSError:
                continue
            stamps.append((file, status.st_size, status.st_mtime_ns))
        return stamps


def view(follower: Follower, width: int) -> Group:
    """The whole view of what was read last, for a terminal of so many columns."""
    run = follower.run
    if run is None:
        return Group(Text(f"Waiting: {one_line(follower.waiting)}", style="dim"))
    health = judge(run.metrics)
    parts = [_head(run, health), *_curve(run, max(width - 12, 20))]
    for reason in health.verdicts[-1].reasons if health else ():  # what is wrong at the last step
        name = (reason.name.replace("_", " "), STYLES[reason.state])
        parts.append(Text.assemble(name, f": {reason.sentence}"))
    parts.append(Text())
    if run.events:
        parts.append(event_table(run.events[-EVENTS:]))
        parts.append(Text(run.show_command(run.events[-1].event_id), style="cyan"))
    elif run.runs:  # GradLoc may have been off: what the log says
        diagnosis = diagnose(run.runs[0])
        parts.append(Text(one_line(diagnosis.headline), style="bold red" if diagnosis.kind else "green"))
    else:
        parts.append(Text("No spike so far.", style="green"))
    parts += [Text(one_line(note), style="yellow") for note in run.notes[-3:]]
    parts.append(Text("Ctrl-C ends.", style="dim"))
    return Group(*parts)


def news(run: RunFolder, known: set[str]) -> list[str]:
    """A line for each event that is not in ``known``; adds them to it."""
    new = [event for event in run.events if event.event_id not in known]
    known.update(event.event_id for event in new)
    return [f"{headline(event)}: {_change(event)}" for event in new]


def _head(run: RunFolder, health: RunHealth) -> Text:
    line = Text(one_line(run.name), style="bold")
    norms, thresholds = run.metrics.logged(run.metrics.norm or MEAN), run.metrics.logged(THRESHOLD)
    threshold = thresholds[-1][1] if thresholds else run.events[-1].trigger.threshold if run.events else None
    if run.metrics:
        norm = norms[-1][1] if norms else None
        line.append(f"  step {run.metrics.steps[-1]:,}  norm {number(norm, 3)}", style="not bold")
    if threshold is not None:
        line.append(f"  threshold {number(threshold, 3)}", style="not bold")
    if health:
        line.append("  ").append(health.state, style=STYLES[health.state])
    return line


def _curve(run: RunFolder, width: int) -> list[Text]:
    metrics, spiked = run.metrics, {event.step.global_step for event in run.events}
    limits = dict(metrics.logged(THRESHOLD))
    norms = metrics.logged(metrics.norm or MEAN)
    return curve([[Judged(step, norm, limits.get(step), step in spiked) for step, norm in norms[-width:]]], width)


def _change(event: Event) -> str:
    after, _ = bounded(event.certificate.norm_after, event.certificate.error_bound, 3)
    return f"{number(event.trigger.grad_norm, 3)} → {after}"
