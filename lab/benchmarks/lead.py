# SPDX-License-Identifier: Apache-2.0
"""Measure how many steps before an explosion each health rule warned, over logs of any trainers:

python -m lab.benchmarks.lead LOG...
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from gradloc.explain.numbers import percent
from gradloc.explain.text import plural
from gradloc.report.logs import LoggedRun, Segment
from gradloc.report.logs.segments import surviving
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.health import HealthConfig, judge
from gradloc.report.runs.run import read_logs
from lab.output import table

EXPLOSION = 10.0
"""Norm of an explosion, in multiples of the normal one."""
HORIZON = 20
"""Logged steps before an explosion in which a warning counts."""
CHANCE = 0.05
"""A rule leads if chance would do as well less often than this."""


@dataclass
class RuleLead:
    """A rule's warnings over all runs."""

    name: str
    ahead: list[int] = field(default_factory=list)
    """Steps from the first warning to the explosion, for each explosion with a warning."""
    num_false: int = 0
    """Number of stretches of warnings that no explosion followed."""
    num_steps: int = 0
    """Number of steps that it judged."""
    lucks: list[float] = field(default_factory=list)
    """Share of a run's steps with a warning in the ``HORIZON`` steps before them, for each explosion."""

    @property
    def leads(self) -> bool:
        """Whether chance would warn of as many explosions in fewer than one of 20 cases."""
        n, p = len(self.lucks), mean(self.lucks or [0.0])
        by_luck = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(len(self.ahead), n + 1))
        return bool(self.ahead) and by_luck < CHANCE

    @property
    def verdict(self) -> str:
        if not self.lucks:
            return "not seen: no run with an explosion logs it"
        if self.leads:
            return "leads"
        return "no better than luck" if self.ahead else "never warned before one"

    @property
    def row(self) -> list[str]:
        """The table's row: name, explosions warned of, steps ahead (median, range), chance, false alarms, verdict."""
        ahead = f"{median(self.ahead):g} ({min(self.ahead)} to {max(self.ahead)})" if self.ahead else "–"
        warned = f"{len(self.ahead)} of {len(self.lucks)}"
        false = f"{self.num_false} in {self.num_steps:,} steps"
        return [f"`{self.name}`", warned, ahead, percent(mean(self.lucks or [0.0]), 2), false, self.verdict]


def lead(runs: Sequence[LoggedRun]) -> tuple[list[RuleLead], list[tuple[str, int, float]]]:
    """Return every rule's result, and (run, first step, multiple of normal) of each explosion."""
    rules = {name: RuleLead(name) for name in HealthConfig.rule_names()}
    onsets = []
    for run in runs:
        large = [e for e in diagnose(run).explosions if not e.is_start and e.times >= EXPLOSION]
        for segment in run.segments:
            own = sorted((e for e in large if e.segment is segment), key=lambda e: e.first)
            onsets += [(run.name, e.first, e.times) for e in own]
            _add(rules, segment, [e.first for e in own])
    return list(rules.values()), onsets


def _add(rules: dict[str, RuleLead], segment: Segment, onsets: list[int]) -> None:
    """Add one segment. Positions count logged steps, so that a log of every tenth step has the same horizon."""
    metrics = surviving(segment)
    health = judge(metrics)
    place = {step: at for at, step in enumerate(metrics.steps)}
    first, begins = place[segment.first], [place[step] for step in onsets]
    for name, rule in rules.items():
        if name in health.silent:
            continue
        faults = [place[v.step] for v in health.verdicts if any(reason.name == name for reason in v.reasons)]
        for begin in begins:
            before = [at for at in faults if begin - HORIZON <= at < begin]
            if before:
                rule.ahead.append(begin - before[0])
        known = set(faults)
        after_fault = [not known.isdisjoint(range(at - HORIZON, at)) for at in range(first, len(metrics.steps))]
        rule.num_steps += len(after_fault)
        rule.lucks += [mean(after_fault)] * len(begins)
        rule.num_false += _num_false([at for at in faults if at >= first], begins)


def _num_false(faults: list[int], begins: list[int]) -> int:
    """Count stretches of warnings, at most a horizon apart, with no explosion during or within a horizon after."""
    stretches = np.split(faults, np.flatnonzero(np.diff(faults) > HORIZON) + 1) if faults else []
    return sum(not any(s[0] <= begin <= s[-1] + HORIZON for begin in begins) for s in stretches)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", metavar="LOG")
    runs = read_logs(parser.parse_args(argv).paths).runs
    rules, onsets = lead(runs)
    steps = sum(len(part.steps) for run in runs for part in run.parts)
    print(f"{plural(len(runs), 'run')}, {plural(steps, 'step')}, {plural(len(onsets), 'explosion')}\n")
    print(table([("run", "explosion at step", "times the normal norm"), *((n, at, f"{x:.3g}") for n, at, x in onsets)]))
    head = ("rule", "warned of", "steps ahead", "by luck", "false alarms", "verdict")
    print("", table([head, *(rule.row for rule in rules if rule.num_steps)]), sep="\n")


if __name__ == "__main__":
    main()
