# SPDX-License-Identifier: Apache-2.0
"""Lead time: how many steps before an explosion did each health rule warn, and how often when nothing followed?

An explosion is what the diagnosis calls one, from ``EXPLOSION`` times normal on or not finite. A rule *warned* of it
when it found fault within the ``HORIZON`` steps before it. A rule that often finds fault is right by luck: the share of
the run's stretches of that length in which it finds fault says how often, and a binomial test whether it did better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...health import HealthConfig
from ..logs import LoggedRun, Segment
from ..logs.segments import surviving
from ..runs.diagnosis import diagnose
from ..runs.health import judge

EXPLOSION = 10.0
"""Times normal."""
HORIZON = 20
"""Steps before an explosion in which a warning counts as one of it."""
CHANCE = 0.05
"""A rule leads where luck would do as well less often than this."""


@dataclass
class RuleLead:
    """One rule over all runs."""

    name: str
    ahead: list[int] = field(default_factory=list)
    """Of each explosion that it warned of, the steps from its first warning to it."""
    num_false: int = 0
    """Stretches of fault that no explosion followed."""
    num_steps: int = 0
    """Steps that it judged."""
    lucks: list[float] = field(default_factory=list)
    """Of each explosion, the share of its run's steps that have a fault within the ``HORIZON`` steps before them."""

    @property
    def num_seen(self) -> int:
        """Explosions of runs that log what the rule reads."""
        return len(self.lucks)

    @property
    def luck(self) -> float:
        """The share of explosions that it would have warned of by luck."""
        return sum(self.lucks) / len(self.lucks) if self.lucks else 0.0

    @property
    def chance(self) -> float:
        """How often luck warns of at least as many."""
        n, p = self.num_seen, self.luck
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(len(self.ahead), n + 1))

    @property
    def leads(self) -> bool:
        return bool(self.ahead) and self.chance < CHANCE

    @property
    def said(self) -> str:
        """What the data say of it."""
        if not self.num_seen:
            return "not seen: no run with an explosion logs it"
        if self.leads:
            return "leads"
        return "no better than luck" if self.ahead else "never warned before one"

    @property
    def steps_ahead(self) -> str:
        """The median of the steps ahead, and their range."""
        return f"{median(self.ahead):g} ({min(self.ahead)} to {max(self.ahead)})" if self.ahead else "–"


@dataclass
class Lead:
    """All rules over all runs."""

    rules: list[RuleLead]
    num_runs: int
    num_steps: int
    onsets: list[tuple[str, int, float]]
    """Of each explosion the run, the step at which it began, and times normal."""


def lead(runs: Sequence[LoggedRun]) -> Lead:
    """Hold every rule's warnings against what exploded."""
    rules = {name: RuleLead(name) for name in HealthConfig.rule_names()}
    onsets, num_steps = [], 0
    for run in runs:
        explosions = diagnose(run).explosions
        for segment in run.segments:
            own = [e for e in explosions if e.segment is segment and not e.is_start and _is_large(e.times)]
            steps = sorted(e.first for e in own)
            onsets += [(run.name, e.first, e.times) for e in sorted(own, key=lambda e: e.first)]
            num_steps += len(segment.metrics.steps)
            _take(rules, segment, steps)
    return Lead(list(rules.values()), len(runs), num_steps, onsets)


def _is_large(times: float) -> bool:
    return times >= EXPLOSION  # endless where no norm was finite


def _take(rules: dict[str, RuleLead], segment: Segment, onsets: list[int]) -> None:
    """Add one segment: places count logged steps, so that a log of every tenth step has the same horizon."""
    metrics = surviving(segment)
    health = judge(metrics)
    place = {step: at for at, step in enumerate(metrics.steps)}
    begins = [place[step] for step in onsets]
    first = place[segment.first]
    for name, rule in rules.items():
        if name in health.silent:
            continue
        faults = [place[v.step] for v in health.verdicts if any(reason.name == name for reason in v.reasons)]
        for begin in begins:
            before = [at for at in faults if begin - HORIZON <= at < begin]
            if before:
                rule.ahead.append(begin - before[0])
        found = set(faults)
        at_fault = [any(back in found for back in range(at - HORIZON, at)) for at in range(first, len(metrics.steps))]
        rule.num_steps += len(at_fault)
        rule.lucks += [sum(at_fault) / len(at_fault)] * len(begins)
        rule.num_false += _num_false([at for at in faults if at >= first], begins)


def _num_false(faults: list[int], begins: list[int]) -> int:
    """Stretches of fault, at most a horizon apart, without an explosion in them or within a horizon after them."""
    stretches: list[list[int]] = []
    for at in faults:
        if stretches and at - stretches[-1][-1] <= HORIZON:
            stretches[-1].append(at)
        else:
            stretches.append([at])
    return sum(not any(s[0] <= begin <= s[-1] + HORIZON for begin in begins) for s in stretches)
