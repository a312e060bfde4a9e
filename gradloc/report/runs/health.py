# SPDX-License-Identifier: Apache-2.0
"""Judges a run's health from its metrics by the rules of the trainer's monitor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ...explain.text import in_unit, plural
from ...health import STATES, HealthConfig, Judge, Judgement, Reason
from ...health.judge import worst_first
from ...health.rules import READ
from ..logs.names import is_norm, listed
from ..logs.recording import Metrics
from ..memory import uncollected

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

LOGGED = "health/state"
TOO_SHORT = "Too short to judge"
CLIP = 1.0
"""verl's own clip limit, of its runs that name none."""
LOSSES = ("actor/loss", "train/loss", "train_loss", "loss", "lm loss", "actor/pg_loss")


@dataclass(frozen=True)
class Finding:
    worst: Reason
    """The first reason of its worst state."""
    worst_step: int
    steps: tuple[int, ...]
    """Every step with this fault."""


class Stretch(NamedTuple):
    """Consecutive logged steps of one state and with the same reasons."""

    first: int
    last: int
    state: str
    note: str
    """The fault at its first step; empty for a healthy one."""


@dataclass
class RunHealth:
    verdicts: list[Judgement] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    """Rules that are on and whose metrics the run does not have."""
    judging: tuple[str, ...] = ()
    """Rules that had as many values as they need before they say anything."""
    metrics: tuple[str, ...] = ()
    """Metrics that the rules read, by the log's names."""
    warmup: int = 0
    unit: str = "step"
    """What the steps count, as :class:`~..logs.recording.Recording` says."""
    is_unrecovered: bool = False
    """Whether the run ends as it is not to be; the rules learn a new level, and then call its last step healthy."""
    is_surviving: bool = False
    """Whether steps that a resume overwrote were left out."""
    spike: int | None = None
    """Step of the run's worst spike by its norms."""
    begin: int | None = None
    """First step of a fault from which the run did not recover; None without one."""
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.verdicts)

    def heed(self, diagnosis: "Diagnosis") -> None:
        """Take over what the run's diagnosis found, which its headline must not contradict."""
        self.is_unrecovered = diagnosis.is_unrecovered
        self.spike = diagnosis.worst and diagnosis.worst.peak.step
        self.begin = diagnosis.begin if self.is_unrecovered else None

    @property
    def state(self) -> str:
        """Return the state at the last step."""
        return self.verdicts[-1].state

    @cached_property
    def worst(self) -> Judgement:
        """Return the first step of the worst state."""
        return _worst(self.verdicts)

    @cached_property
    def num_unwell(self) -> int:
        return sum(bool(verdict.reasons) for verdict in self.verdicts)

    @property
    def is_too_short(self) -> bool:
        """Whether nothing was found in fewer steps than most rules need."""
        return not self.num_unwell and len(self.verdicts) <= self.warmup

    @property
    def is_finite_alone(self) -> bool:
        """Whether all that the rules could say is that the metrics are finite."""
        return not self.num_unwell and {*self.judging} <= {"non_finite"}

    @property
    def headline(self) -> str:
        """Return the run's state in a sentence or two."""
        said = in_unit(self._headline, self.unit)
        return f"Without what a resume overwrote: {said[0].lower()}{said[1:]}" if self.is_surviving else said

    @property
    def _headline(self) -> str:
        last = self.verdicts[-1]
        steps = plural(len(self.verdicts), "step")
        if self.is_too_short:
            return f"{TOO_SHORT}: {steps}, and the rules that compare with earlier steps need {self.warmup + 1}."
        if self.is_finite_alone:
            verb, its = ("is", "its level and trend") if len(self.metrics) == 1 else ("are", "their levels and trends")
            return f"{listed(self.metrics, 5)} {verb} finite in all {steps}; {its} are not judged here."
        if not self.num_unwell:
            return f"No fault in {steps}, by {plural(len(self.judging), 'rule')} on {listed(self.metrics, 5)}."
        said = [self.share]
        is_said = self.is_unrecovered and last.state == STATES[0] or self.num_unwell == 1 and last is self.worst
        if not is_said:
            said.append(f"At the last step ({last.step}): {last.state}.")
        elif self.is_unrecovered:
            said.append("The rules compare each step with earlier ones, so they do not flag a level that stays high.")
        if any(verdict.step == self.spike and not verdict.reasons for verdict in self.verdicts[: self.warmup]):
            said.append(
                f"The spike at step {self.spike} is in the first {self.warmup} steps, where the rules that compare "
                "with earlier steps find nothing."
            )
        return " ".join(said)

    @property
    def share(self) -> str:
        """Say how many steps were not healthy, and which were the first, and the first of the worst."""
        rows = "rows" if len({verdict.step for verdict in self.verdicts}) < len(self.verdicts) else "steps"
        if self.num_unwell == 1:
            return f"1 of {len(self.verdicts)} {rows} was not healthy: step {self.worst.step} ({self.worst.state})."
        first, worst = self.firsts[0], self.worst
        then = f"; first {worst.state} at step {worst.step}" if worst.state != first.state else ""
        return (
            f"{self.num_unwell} of {len(self.verdicts)} {rows} were not healthy, the first at step {first.step} "
            f"({first.state}){then}."
        )

    @cached_property
    def firsts(self) -> list[Judgement]:
        """Return the first step that was not healthy, and the first of the worst state where another rule found it."""
        unwell = [verdict for verdict in (*self.verdicts, self.worst) if verdict.reasons]
        first = unwell[:1]
        is_other = first and self.worst.reasons[0].name != first[0].reasons[0].name
        return [*first, self.worst] if is_other else first

    @cached_property
    def findings(self) -> list[Finding]:
        """Return every rule that found fault: the worst first, then in the order of the rules."""
        faults: dict[str, list[tuple[int, Reason]]] = {name: [] for name in HealthConfig.rule_names()}
        for verdict in self.verdicts:
            for reason in verdict.reasons:
                faults[reason.name].append((verdict.step, reason))
        findings = []
        for found in filter(None, faults.values()):
            step, worst = max(found, key=lambda fault: STATES.index(fault[1].state))
            findings.append(Finding(worst, step, tuple(step for step, _ in found)))
        return sorted(findings, key=lambda finding: -STATES.index(finding.worst.state))

    def spans(self, most: int) -> list[Stretch]:
        """Split the run into at most ``most`` spans; of more, neighbours merge into the worst."""
        size = max(-(-len(self.verdicts) // most), 1)
        parts = [self.verdicts[at : at + size] for at in range(0, len(self.verdicts), size)]
        worsts = [(part[0].step, part[-1].step, _worst(part)) for part in parts]
        spans = []
        for _, group in groupby(worsts, lambda part: (part[2].state, [reason.name for reason in part[2].reasons])):
            (first, last, worst), *others = group
            last = others[-1][1] if others else last
            when = in_unit(f"Step {first}" if first == last else f"Steps {first}-{last}", self.unit)
            why = " ".join(f"{reason.name}: {reason.sentence}" for reason in worst.reasons)
            spans.append(Stretch(first, last, worst.state, f"{when}: {worst.state}. {why}" if why else ""))
        return spans


def _worst(verdicts: Sequence[Judgement]) -> Judgement:
    return max(verdicts, key=lambda verdict: STATES.index(verdict.state))


@uncollected()
def judge(
    metrics: Metrics | Sequence[Metrics], config: HealthConfig | None = None, grad_clip: float | None = None
) -> RunHealth:
    """Judge a run's steps in the order in which they were logged.

    Args:
        metrics: of a run that was resumed, each part's: a step that was logged twice is judged twice.
        config: thresholds; the trainer's defaults when None.
        grad_clip: the norm that the run's gradients were clipped to; 0: to nothing; None: to verl's default where the
            norm has verl's name, and else to an unknown one, which no rule compares with.

    Returns:
        Empty when no step has a metric that the rules read.
    """
    config = config or HealthConfig()
    parts = [metrics] if isinstance(metrics, Metrics) else metrics
    if grad_clip is None and all("actor/grad_norm" not in part.called for part in parts):
        grad_clip = CLIP
    rules = Judge(config, grad_clip or None)
    health = RunHealth(unit=parts[0].unit if parts else "step")
    differences: list[str] = []
    for part in parts:
        read = [name for name in READ if name in part.series]
        rows = zip(*(part.series[name] for name in read), strict=True) if read else [()] * len(part.steps)
        judged = []
        for at, (step, row) in enumerate(zip(part.steps, rows, strict=True)):
            verdict = rules.observe(step, dict(zip(read, row, strict=True)))
            if verdict is not None:
                judged.append(_by_the_log(verdict, part, at) if verdict.reasons else verdict)
        health.verdicts += judged
        differences += _differences(part, judged)
    known = [name for name in config.rule_names() if getattr(config, name) is not None]
    health.silent = tuple(name for name in known if name not in rules.heard)
    health.judging, health.warmup = rules.judging, config.warmup
    own = {name: called for part in parts for name, called in part.called.items()}
    health.metrics = tuple(dict.fromkeys(own.get(name, name) for name in rules.read))
    if 0 < len(health.verdicts) <= config.warmup:
        least, steps = config.warmup + 1, plural(len(health.verdicts), "step")
        why = f"The run has {steps}, and the rules that compare with earlier steps need {least}. "
        how = f"To judge fewer than {least} steps: gradloc health RUN_DIR --set warmup=3"
        health.notes.append(why + how if health.num_unwell else how)
    health.notes += differences
    health.notes = [in_unit(note, health.unit) for note in health.notes]
    return health


def _by_the_log(verdict: Judgement, metrics: Metrics, at: int) -> Judgement:
    """Name the metrics in a verdict's reasons as the log does, and lower a danger to a warning where only a norm is
    not finite: with a finite loss, the weights are finite.

    ``at`` is the place of the verdict's step.
    """
    logged = [values[at] for name in LOSSES if (values := metrics.series.get(name))]
    losses = [loss for loss in logged if loss is not None]
    is_skipped = bool(logged) and not losses  # Megatron leaves the loss out, and writes a norm of 0
    reasons = [
        replace(reason, metric=metrics.called[reason.metric]) if reason.metric in metrics.called else reason
        for reason in verdict.reasons
        if not (reason.name == "no_gradient" and is_skipped)
    ]
    unsound = [reason for reason in reasons if reason.name == "non_finite" and is_norm(reason.metric)]
    if unsound and verdict.state == STATES[-1]:
        if losses and all(loss and math.isfinite(loss) for loss in losses):  # a Trainer writes 0 for a NaN
            lowered = replace(unsound[0], state=STATES[1], note="The loss is finite, so these steps were skipped.")
            reasons[reasons.index(unsound[0])] = lowered
    return Judgement(verdict.step, worst_first(reasons))


def _differences(metrics: Metrics, verdicts: list[Judgement]) -> list[str]:
    """Note where the run's own monitor judged differently."""
    logged = dict(metrics.logged(LOGGED))
    known = [v for v in verdicts if v.step in logged]
    others = [v.step for v in known if STATES[int(logged[v.step])] != v.state]
    if not others:
        return []
    return [
        f"The run's own monitor judged {len(others)} of {len(known)} steps differently, first step {others[0]}: it "
        "had other thresholds or another clip limit. Set the same ones here with --set and --grad-clip."
    ]


def ranges(steps: Sequence[int], most: int = 5) -> str:
    """Write steps as ranges.

    >>> ranges((5, 8, 9, 10)), ranges(()), ranges((1, 3, 5, 7, 9, 11, 12))
    ('5, 8-10', '', '1, 3, 5, 7, 9 and 2 more')
    """
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), lambda at: at[1] - at[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most]]
    rest = sum(map(len, runs[most:]))
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
