# SPDX-License-Identifier: Apache-2.0
"""What the terminal shows of a run that has a log alone: the diagnosis, the curve, what else to run."""

import shlex

from rich.console import Console
from rich.text import Text

from ...words.text import one_line, plural, visible
from ..runs.diagnosis import Diagnosis, diagnose
from ..runs.health import judge
from ..runs.run import RunFolder
from .curve import curve
from .terminal import next_steps

RUNS = 20
"""Runs that are told in a line each, after the worst one."""


def show(found: RunFolder) -> None:
    """Print what happened in the worst run, a line for each other one, and what to do next."""
    console = Console(highlight=False)
    diagnoses = [diagnose(run, near=found.path) for run in found.log.runs]
    first, *others = diagnoses
    console.print(Text(_head(first), style="bold"))
    console.print(Text(visible(first.headline), style="bold red" if first.worst else ""))
    for sentence in first.sentences:
        console.print(Text(visible(sentence)))
    if first.command:
        console.print(Text(f"    {visible(first.command)}", style="cyan"), soft_wrap=True)
    console.print()
    for line in curve(first.judged, max(console.width - 12, 20)):
        console.print(line)
    health = judge([segment.metrics for segment in first.run.segments])
    if health:
        console.print(Text(f"Health: {first.beside(health)}"))
        worst = next(iter(health.findings), None)
        if worst is not None:
            console.print(Text(f"  {worst.worst.name}, step {worst.worst_step}: {worst.worst.sentence}", style="dim"))
    for note in [*first.limits, *found.notes]:
        console.print(Text(visible(note), style="yellow"))
    if others:
        console.print()
        console.print(Text(f"{plural(len(others), 'other run')}:", style="bold"))
    for other in others[:RUNS]:
        console.print(Text(f"  {one_line(other.run.name)}: {visible(other.headline)}"))
    if len(others) > RUNS:
        console.print(Text(f"  And {len(others) - RUNS} more.", style="dim"))
    if str(found.path) != "-":
        _next(console, found)


def _head(diagnosis: Diagnosis) -> str:
    """The run, what wrote it, and how its steps lie."""
    run = diagnosis.run
    parts = [f"steps {segment.first:,} to {segment.last:,}" for segment in run.segments]
    spans = parts[0] + "".join(f", then {part}" for part in parts[1:4]) + (", ..." if len(parts) > 4 else "")
    count = len(run.segments[0].metrics.own_names)
    return f"{one_line(run.name)} ({run.format}): {spans}, {plural(count, 'metric')}"


def _next(console: Console, found: RunFolder) -> None:
    where = shlex.quote(str(found.path))
    steps = [
        ("step by step, with what people do about it", f"gradloc-report health {where}"),
        ("other settings of the trigger", f"gradloc-report trigger {where} --set cap=6"),
        ("the page", f"gradloc-report {where} -o page.html"),
    ]
    next_steps(console, steps)
