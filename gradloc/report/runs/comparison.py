# SPDX-License-Identifier: Apache-2.0
"""What differs between two runs: norms, events, causes, the end of training."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...record import Event
from ...words.numbers import number
from ..text import one_line, spoken
from .metrics import MAX, MEAN
from .run import RunFolder

ENDS = {"critic/score/mean": "score, last", "actor/entropy": "entropy, last"}
"""Metrics of which the last value is compared."""


@dataclass
class Comparison:
    """Two runs as rows of text."""

    names: list[str]
    rows: list[list[str]]
    """Label, first run, second run."""
    steps: list[list[str]]
    """For every step with an event in either run: the step, and what each run found there."""


def compare(first: RunFolder, second: RunFolder) -> Comparison:
    """Put two runs side by side; a run without metrics or events has dashes."""
    names = [run.name for run in (first, second)]
    if names[0] == names[1]:  # two runs of one experiment
        names = [
            f"{run.name} ({part})" for run, part in zip((first, second), _apart(first.path, second.path), strict=True)
        ]
    columns = [_column(run) for run in (first, second)]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return Comparison(names, rows, _steps(first.events, second.events))


def _apart(first: Path, second: Path) -> tuple[str, str]:
    """The parts of two paths that tell them apart; first and second where nothing does.

    >>> _apart(Path("/runs/a/gradloc"), Path("/runs/b/gradloc"))
    ('a', 'b')
    """
    left, right = list(first.resolve().parts), list(second.resolve().parts)
    while left and right and left[-1] == right[-1]:
        left.pop(), right.pop()
    while left and right and left[0] == right[0]:
        left.pop(0), right.pop(0)
    if not left and not right:
        return "first", "second"
    return "/".join(left) or first.resolve().name, "/".join(right) or second.resolve().name


def _column(run: RunFolder) -> dict[str, str]:
    mean = run.metrics.finite(MEAN)
    top = run.metrics.finite(MAX) or mean
    causes = Counter(spoken(c.cause.label) for e in run.events for c in e.culprits)
    seconds = [e.search.seconds for e in run.events if e.search.seconds is not None]
    made = {
        "steps": number(len(run.metrics.steps)) if run.metrics else "–",
        "gradient norm, median": number(sorted(mean)[len(mean) // 2]) if mean else "–",
        "gradient norm, largest": number(max(top)) if top else "–",
        "events": number(len(run.events)),
        "explained": number(sum(e.certificate.verdict == "explained" for e in run.events)),
        "culprits": number(sum(len(e.culprits) for e in run.events)),
        "causes": ", ".join(f"{label} {count}" for label, count in causes.most_common(4)) or "–",
        "backward passes, searching": number(sum(e.search.backwards or 0 for e in run.events)),
        "seconds, searching": number(sum(seconds)) if seconds else "–",
    }
    for metric, label in ENDS.items():
        values = run.metrics.finite(metric)
        made[label] = number(values[-1]) if values else "–"
    return made


def _steps(first: list[Event], second: list[Event]) -> list[list[str]]:
    by_step: dict[int, tuple[list[Event], list[Event]]] = {}
    for index, events in enumerate((first, second)):
        for event in events:
            by_step.setdefault(event.step.global_step, ([], []))[index].append(event)
    return [[str(step), *map(_found, by_step[step])] for step in sorted(by_step)]


def _found(events: list[Event]) -> str:
    parts = []
    for event in events:
        token = one_line(event.culprits[0].text, 20) if event.culprits else "no culprit"
        parts.append(f"{number(event.trigger.grad_norm)} ({token})")
    return ", ".join(parts) or "–"
