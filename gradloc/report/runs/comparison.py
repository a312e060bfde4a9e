# SPDX-License-Identifier: Apache-2.0
"""What differs between two runs: norms, events, causes, the end of training."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ...record import Event
from ...words.numbers import number
from ...words.text import one_line, plural, spoken
from .metrics import MAX, MEAN, Metrics
from .run import RunFolder

_TIMED = re.compile(r"tim(?:e|ing)|perf|throughput|memory|mfu|tokens_per|_s$|/s$|runtime|^_", re.IGNORECASE)
"""What differs between any two runs."""
_FIRST = (MAX, MEAN, "critic/score/mean", "actor/entropy", "actor/kl_loss", "actor/ppo_kl", "response_length/mean")
_LEVELS = 40
"""Metrics whose level is looked at."""
_LEARNED, _WINDOW = 8, 50
"""Steps from which a scatter is learned, at least and at most."""
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
    parted: str = ""
    """Where the two part, in a sentence."""
    settings: list[list[str]] = field(default_factory=list)
    """The settings in which they differ, where both logs hold theirs: name, first run, second run."""


def compare(first: RunFolder, second: RunFolder) -> Comparison:
    """Put two runs side by side; a run without metrics or events has dashes."""
    names = [run.name for run in (first, second)]
    if names[0] == names[1]:  # two runs of one experiment
        names = [
            f"{run.name} ({part})" for run, part in zip((first, second), _apart(first.path, second.path), strict=True)
        ]
    columns = [_column(run) for run in (first, second)]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    if not first.events and not second.events:  # logs alone: what is of events says nothing
        rows = [row for row in rows if not {*row[1:]} <= {"0", "–"}]
    settings = _settings(*(run.log.runs[0].config if run.log else {} for run in (first, second)))
    return Comparison(
        names, rows, _steps(first.events, second.events), _parted(first.metrics, second.metrics), settings
    )


def _parted(first: Metrics, second: Metrics) -> str:
    """The first step at which two runs part, and by which metric.

    Runs that are the same for a while part where any metric differs; runs that differ from the start, as seeds do, part
    where a metric leaves the scatter of the differences before it, for good.
    """
    places = [{step: at for at, step in enumerate(metrics.steps)} for metrics in (first, second)]
    common = [step for step in first.steps if step in places[1]]
    names = [name for name in first.series if name in second.series and not _TIMED.search(name)]
    if not common or not names:
        return "The two have no step and metric in common."

    def pairs(name: str) -> list[tuple[int, float, float]]:
        values = [
            [metrics.get(name)[at[step]] for step in common]
            for metrics, at in zip((first, second), places, strict=True)
        ]
        return [(step, a, b) for step, a, b in zip(common, *values, strict=True) if a is not None and b is not None]

    differ = [
        next(((step, name, a, b) for step, a, b in pairs(name) if not _same(a, b)), None)
        for name in sorted(names, key=_rank)
    ]
    found = [entry for entry in differ if entry is not None]
    if not found:
        return f"The two are the same in all of their {plural(len(common), 'common step')}."
    step, name, a, b = min(found, key=lambda entry: entry[0])
    if step > common[0]:
        return (
            f"The two are the same until step {step}, where {name} is {number(a, 4)} and {number(b, 4)}: "
            "data, weights and seed were the same until then."
        )
    away = [entry for name in sorted(names, key=_rank)[:_LEVELS] if (entry := _leaves(name, pairs(name))) is not None]
    if not away:
        return f"The two differ from step {step} on, as two seeds do; no metric leaves that scatter."
    step, name, a, b = min(away, key=lambda entry: entry[0])
    return f"The two part at step {step}: {name} is {number(a, 3)} and {number(b, 3)}, beyond how they differed before."


def _leaves(name: str, pairs: list[tuple[int, float, float]]) -> tuple[int, str, float, float] | None:
    """Where the difference of two series leaves its scatter, for three steps in a row."""
    scale = [abs(a - b) / (abs(a) + abs(b) or 1.0) if math.isfinite(a - b) else 1.0 for _, a, b in pairs]
    for at in range(_LEARNED, len(pairs) - 2):
        before = sorted(scale[max(at - _WINDOW, 0) : at])
        limit = max(3 * before[int(0.9 * len(before))], 0.2)
        if min(scale[at : at + 3]) > limit or scale[at] > max(2 * limit, 0.8):
            return pairs[at][0], name, pairs[at][1], pairs[at][2]
    return None


def _same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))


def _rank(name: str) -> tuple[int, str]:
    """The metrics that people look at first."""
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _settings(first: dict, second: dict) -> list[list[str]]:
    if not first or not second:
        return []
    names = sorted(name for name in first.keys() | second.keys() if str(first.get(name)) != str(second.get(name)))
    return [[name, str(first.get(name, "–")), str(second.get(name, "–"))] for name in names]


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
