# SPDX-License-Identifier: Apache-2.0
"""Compares two runs: norms, events, causes, the end of training."""

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...explain.numbers import number
from ...explain.text import in_unit, one_line, plural, plural_of, spoken
from ..logs.names import is_norm
from ..logs.recording import MAX, MEAN, Metrics
from .diagnosis import diagnose
from .run import RunFolder

_TIMED = re.compile(
    r"tim(?:e|ing)|seconds|per_second|perf|throughput|memory|mfu|tokens_per|_s$|/s$|runtime|^_", re.IGNORECASE
)
"""Metrics that differ between any two runs."""
_FIRST = (MAX, MEAN, "critic/score/mean", "actor/entropy", "actor/kl_loss", "actor/ppo_kl", "response_length/mean")
"""Metrics to look at first."""
_NUM_SCATTERED = 40
"""Most metrics whose scatter is compared."""
_LEARNED, _WINDOW = 8, 50
"""Steps from which a scatter is learned, at least and at most."""
_APART = 0.2
"""Difference of two values over the sum of their sizes from which they are apart: one is 1.5 times the other."""

Pair = tuple[int, float, float]
"""A step, and the values of both runs there."""


@dataclass
class Comparison:
    """Two runs as rows of text."""

    names: list[str]
    rows: list[list[str]]
    """Label, first run, second run."""
    steps: list[list[str]]
    """For every step with a spike in either run: the step, and what each run has there."""
    unit: str = "step"
    """What the steps count, as :class:`~..logs.recording.Recording` says."""
    parted: str = ""
    """Sentences about the step at which the two diverge, or about their difference where they never were together."""
    settings: list[list[str]] = field(default_factory=list)
    """Settings that differ, where both logs have them: name, first run, second run."""


def compare(first: RunFolder, second: RunFolder) -> Comparison:
    """Compare two runs; a run without metrics or events has dashes."""
    names = [first.name, second.name]
    if first.name == second.name:  # two runs of one experiment
        shared = os.path.commonpath([first.path.resolve(), second.path.resolve()])
        places = [os.path.relpath(run.path.resolve(), shared) for run in (first, second)]
        if "." in places:  # one within the other
            places = [str(first.path), str(second.path)]
        names = [f"{first.name} ({place})" for place in places]
    columns = [_column(run) for run in (first, second)]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    no_values = {"–"} if first.events or second.events else {"0", "–"}
    rows = [row for row in rows if not {*row[1:]} <= no_values]
    unit, other = first.metrics.unit, second.metrics.unit
    if unit != other:
        apart = (
            f"{names[0]} gives {plural_of(unit)} and {names[1]} {plural_of(other)}, so they cannot be compared one by "
            "one; the table is of each whole run."
        )
        return Comparison(names, rows, [], "step", apart, _settings(first, second))
    spikes = [_spikes(run) for run in (first, second)]
    steps = []
    for step in sorted({*spikes[0], *spikes[1]}):
        cells = [found.get(step) or _no_spike(run, step) for found, run in zip(spikes, (first, second), strict=True)]
        steps.append([str(step), *cells])
    parted = f"{_parted(first.metrics, second.metrics, names)}{_cut(first.metrics, second.metrics)}"
    return Comparison(names, rows, steps, unit, in_unit(parted, unit), _settings(first, second))


def _cut(first: Metrics, second: Metrics) -> str:
    """Say which steps were compared, where one run has others; empty where both have the same."""
    common = sorted({*first.steps} & {*second.steps})
    if not common or first.steps == second.steps:
        return ""
    return (
        f" Only the {plural(len(common), 'step')} that both runs logged ({common[0]} to {common[-1]}) were compared; "
        "the tables cover each whole run."
    )


def _parted(first: Metrics, second: Metrics, runs: Sequence[str]) -> str:
    """Say at which step and by which metric two runs diverge first, or that they never were together.

    Runs that are the same for a while part where any metric differs; runs that differ from the start, as seeds do, part
    where a metric leaves the scatter of their differences, for good. A metric that is apart throughout leaves nothing.
    """
    common = sorted({*first.steps} & {*second.steps})
    names = [name for name in first.series if name in second.series and not _TIMED.search(name)]
    names.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    if not common or not names:
        return f"The runs have no {'metric' if common else 'step'} in common."
    pairs: dict[str, list[Pair]] = {}
    different: list[tuple[Pair, str]] = []
    for name in names:
        others = dict(second.logged(name))
        pairs[name] = [(step, value, others[step]) for step, value in first.logged(name) if step in others]
        for pair in pairs[name]:
            _, value, other = pair
            if not (math.isclose(value, other, rel_tol=1e-6) or math.isnan(value) and math.isnan(other)):
                different.append((pair, name))
    if not different:
        return f"The runs are the same in all of their {plural(len(common), 'common step')}."
    (step, *values), name = min(different, key=lambda entry: entry[0][0])
    if step > common[0]:
        return (
            f"The runs are the same up to step {max(each for each in common if each < step)}. At step {step} "
            f"{_both(name, values, runs, 4)}. Data, weights and seed were probably the same up to there."
        )
    apart, lost, leaving = [], [], []
    for name in names[:_NUM_SCATTERED]:
        gone = next((pair for pair in pairs[name] if math.isfinite(pair[1]) != math.isfinite(pair[2])), None)
        if gone:
            lost.append((gone, name))
        if not gone and _is_apart(pairs[name]):
            apart.append(name)
        elif pair := _leaving(pairs[name], is_norm(name)):
            leaving.append((pair, name))
    leaving += lost
    if apart and (apart[0] == names[0] or not leaving):
        return _throughout(apart[0], pairs[apart[0]], lost, runs)
    if not leaving and len(common) <= _LEARNED:
        verb = "is" if len(common) == 1 else "are"
        return f"The runs differ from step {step} on; {plural(len(common), 'common step')} {verb} too few to say more."
    if not leaving:
        return f"The runs differ from step {step} on, in no metric by more than runs of two seeds do."
    (at, *values), name = min(leaving, key=lambda entry: entry[0][0])
    before = f" Before step {at} they differ no more than runs of two seeds do." if at > step else ""
    return f"The runs part at step {at}: {_both(name, values, runs)}.{before}"


def _both(name: str, values: Sequence[float], runs: Sequence[str], digits: int = 3) -> str:
    """Say what a metric is in each of two runs."""
    first, second = (f"{number(value, digits)} in {run}" for value, run in zip(values, runs, strict=True))
    return f"{name} is {first} and {second}"


def _is_apart(pairs: list[Pair]) -> bool:
    """Return whether two series never were together: one is 1.5 times the other or more, at nine steps of ten."""
    differences = [(a - b) / (abs(a) + abs(b) or 1.0) for _, a, b in pairs if math.isfinite(a - b)]
    most = max(sum(d > _APART for d in differences), sum(d < -_APART for d in differences))
    return len(differences) > _LEARNED and most >= 0.9 * len(differences)


def _throughout(name: str, pairs: list[Pair], lost: list[tuple[Pair, str]], runs: Sequence[str]) -> str:
    """Say how far apart a metric of two runs is, and where most.

    Args:
        name: the metric's name.
        pairs: its values in both runs.
        lost: where metrics are finite in one run alone, which is the largest gap.
        runs: their names.
    """
    known = [(step, a, b) for step, a, b in pairs if math.isfinite(a - b)]
    usual = [median(values) for values in list(zip(*known, strict=True))[1:]]
    widest = max(known, key=lambda pair: _gap(*pair[1:])), name
    (step, *values), where = min(lost, default=widest, key=lambda entry: entry[0][0])
    return (
        f"The runs differ throughout: the median of {_both(name, usual, runs)}. They are furthest apart at step "
        f"{step}, where {_both(where, values, runs)}."
    )


def _gap(one: float, other: float) -> float:
    """Return the difference of two values over the sum of their sizes; 1 where one is not finite."""
    return abs(one - other) / (abs(one) + abs(other) or 1.0) if math.isfinite(one - other) else 1.0


def _leaving(pairs: list[Pair], has_spikes: bool = False) -> Pair | None:
    """Find where the difference of two series leaves its scatter, for three steps in a row or by far at once.

    A norm is positive, so that 40 times the other one's is by far, however much they scattered. The first steps have
    no scatter before them: there only what is by far beyond the scatter of those around it counts.
    """
    gaps = [_gap(a, b) for _, a, b in pairs]
    for at in range(len(pairs) - 2 if len(pairs) > _LEARNED else 0):
        is_learned = at >= _LEARNED
        others = gaps[max(at - _WINDOW, 0) : at] + ([] if is_learned else gaps[at + 1 : _WINDOW])
        limit = max(3 * sorted(others)[int(0.9 * len(others))], 0.2)
        far = max(2 * limit, 0.8)
        is_lasting = is_learned and min(gaps[at : at + 3]) > limit
        if is_lasting or gaps[at] > (min(far, 0.95) if has_spikes else far):
            return pairs[at]
    return None


def _settings(first: RunFolder, second: RunFolder) -> list[list[str]]:
    configs = (run.runs[0].config if run.runs else {} for run in (first, second))
    ours, theirs = ({name: str(value) for name, value in config.items()} for config in configs)
    if not ours or not theirs:
        return []
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return [[name, ours.get(name, "–"), theirs.get(name, "–")] for name in names]


def _column(run: RunFolder) -> dict[str, str]:
    mean = run.metrics.finite(MEAN)
    norms = run.metrics.known(MAX) or run.metrics.known(MEAN)
    step, top = max(norms, key=lambda point: point[1], default=(0, 0.0))
    every = [norm for part in run.runs[0].parts for norm in part.norms] if run.runs else []
    largest = f"{number(top)} at {run.metrics.unit} {step}" if norms else "–"
    if norms and max(every, default=0.0) > top:
        largest += f" ({number(max(every))} in what a resume has overwritten)"
    rows = run.events.rows
    causes = Counter(spoken(row.cause) for row in rows if row.cause)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    column = {
        "steps": number(len(run.metrics.steps)) if run.metrics else "–",
        "gradient norm, median": number(median(mean)) if mean else "–",
        "gradient norm, largest": largest,
        "events": number(len(run.events)),
        "explained": number(sum(row.is_explained for row in rows)),
        "culprits": number(sum(row.num_culprits for row in rows)),
        "causes": ", ".join(f"{label} {count}" for label, count in causes.most_common(4)) or "–",
        "seconds, searching": number(sum(seconds)) if seconds else "–",
    }
    for metric, label in {"critic/score/mean": "score, last", "actor/entropy": "entropy, last"}.items():
        column[label] = number((run.metrics.finite(metric) or [None])[-1])
    return column


def _spikes(run: RunFolder) -> dict[int, str]:
    """Return a run's spikes by step: its events, or, where it has none, what its log shows."""
    if not run.events:
        explosions = diagnose(run.runs[0]).explosions if run.runs else []
        return {found.peak.step: f"{number(found.peak.norm)} ({found.label})" for found in explosions}
    found: dict[int, list[str]] = {}
    for row in run.events.rows:
        found.setdefault(row.step, []).append(f"{number(row.norm)} ({one_line(row.token, 20) or 'no culprit'})")
    return {step: ", ".join(tokens) for step, tokens in found.items()}


def _no_spike(run: RunFolder, step: int) -> str:
    steps = run.metrics.steps
    return "–" if not steps or steps[0] <= step <= steps[-1] else "not in its log"
