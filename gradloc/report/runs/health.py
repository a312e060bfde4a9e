# SPDX-License-Identifier: Apache-2.0
"""A run's health from its metrics, judged by the very rules that the trainer's monitor asks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...health import STATES, HealthConfig, Judge, Reason, Verdict
from ...words.text import plural
from .metrics import Metrics

LOGGED = "health/state"
_UNREAD = ("perf/", "timing", "val-", "global_seqlen/", "prompt_length/", "critic/advantages/", "critic/returns/")
"""What no rule reads: half of what verl logs."""
CLIP = 1.0
"""verl's own clip limit: what is assumed where none is named."""


@dataclass(frozen=True)
class Finding:
    """One rule's fault over the run."""

    worst: Reason
    """At its worst state, the first time."""
    worst_step: int
    steps: tuple[int, ...]
    """Every step at which it was found."""


@dataclass(frozen=True)
class Span:
    """Consecutive logged steps of one state and with the same reasons."""

    first: int
    last: int
    state: str
    reasons: tuple[Reason, ...]
    """As they were at the span's first step."""

    @property
    def note(self) -> str:
        """The span in words."""
        when = f"Step {self.first}" if self.first == self.last else f"Steps {self.first}-{self.last}"
        said = " ".join(f"{reason.name}: {reason.sentence}" for reason in self.reasons)
        return f"{when}: {self.state}. {said}".rstrip()


@dataclass
class RunHealth:
    """What was judged of a run."""

    verdicts: list[Verdict] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    """Rules that are on and whose metrics the run does not have."""
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.verdicts)

    @property
    def state(self) -> str:
        """At the last step."""
        return self.verdicts[-1].state

    @property
    def worst(self) -> Verdict:
        """The first step of the worst state."""
        return max(self.verdicts, key=lambda verdict: STATES.index(verdict.state))

    @property
    def num_unwell(self) -> int:
        """Steps that were not healthy."""
        return sum(verdict.state != STATES[0] for verdict in self.verdicts)

    @property
    def headline(self) -> str:
        """The run's state in a sentence or two."""
        last = self.verdicts[-1]
        if not self.num_unwell:
            return f"Healthy throughout ({plural(len(self.verdicts), 'step')})."
        verb = "was" if self.num_unwell == 1 else "were"
        share = f"{self.num_unwell} of {len(self.verdicts)} steps {verb} not healthy"
        worst = f"the worst state was {self.worst.state}, first at step {self.worst.step}"
        return f"At the last step, {last.step}: {last.state}. {share}; {worst}."

    @property
    def findings(self) -> list[Finding]:
        """Every rule that found fault: the worst first, then in the order of the rules."""
        found: dict[str, list[tuple[int, Reason]]] = {name: [] for name in HealthConfig.rule_names()}
        for verdict in self.verdicts:
            for reason in verdict.reasons:
                found[reason.name].append((verdict.step, reason))
        made = []
        for entries in filter(None, found.values()):
            step, worst = max(entries, key=lambda entry: STATES.index(entry[1].state))
            made.append(Finding(worst, step, tuple(step for step, _ in entries)))
        return sorted(made, key=lambda finding: -STATES.index(finding.worst.state))

    def spans(self, most: int) -> list[Span]:
        """The run as at most so many spans; of more, neighbours are told by their worst step."""
        size = max(-(-len(self.verdicts) // most), 1)
        bins = [self.verdicts[at : at + size] for at in range(0, len(self.verdicts), size)]
        made: list[Span] = []
        for members in bins:
            worst = max(members, key=lambda verdict: STATES.index(verdict.state))
            names = [reason.name for reason in worst.reasons]
            before = made[-1] if made else None
            if before and before.state == worst.state and names == [r.name for r in before.reasons]:
                made[-1] = Span(before.first, members[-1].step, before.state, before.reasons)
            else:
                made.append(Span(members[0].step, members[-1].step, worst.state, worst.reasons))
        return made


def judge(
    metrics: Metrics | Sequence[Metrics], config: HealthConfig | None = None, grad_clip: float | None = CLIP
) -> RunHealth:
    """Judge a run's steps in the order in which they were logged.

    Args:
        metrics: of a patched or an unpatched verl; of a run that was resumed, each part's, and a step that was logged
            twice is judged twice.
        config: thresholds; the trainer's defaults when None.
        grad_clip: the norm that the run's gradients were clipped to; None: to nothing.

    Returns:
        Empty when no step has a metric that the rules read.
    """
    config = config or HealthConfig()
    asked = Judge(config, grad_clip)
    parts = [metrics] if isinstance(metrics, Metrics) else metrics
    verdicts, differences = [], []
    for part in parts:
        judged = []
        read = {name: values for name, values in part.series.items() if not name.startswith(_UNREAD)}
        for index, step in enumerate(part.steps):
            verdict = asked.observe(step, {name: values[index] for name, values in read.items()})
            if verdict is not None:
                judged.append(_in_own_words(verdict, part))
        verdicts += judged
        differences += _differences(part, judged)
    known = [name for name in config.rule_names() if getattr(config, name) is not None]
    made = RunHealth(verdicts, tuple(name for name in known if name not in asked.heard))
    if verdicts and len(verdicts) <= config.warmup:
        made.notes.append(
            f"The run has {plural(len(verdicts), 'step')}, and rules about its own history are "
            f"silent for the first {config.warmup}. To hear them sooner: gradloc-report health RUN_DIR --set warmup=3"
        )
    made.notes += differences
    return made


def _in_own_words(verdict: Verdict, metrics: Metrics) -> Verdict:
    """A verdict whose reasons name the metrics as the log does."""
    if not verdict.reasons or not metrics.called:
        return verdict
    reasons = []
    for reason in verdict.reasons:
        own = metrics.called.get(reason.metric, reason.metric)
        reasons.append(replace(reason, metric=own, sentence=reason.sentence.replace(reason.metric, own)))
    return replace(verdict, reasons=tuple(reasons))


def _differences(metrics: Metrics, verdicts: list[Verdict]) -> list[str]:
    """A note when the run's own monitor said otherwise."""
    logged = dict(zip(metrics.steps, metrics.get(LOGGED), strict=True))
    known = [v for v in verdicts if logged[v.step] is not None]
    others = [v.step for v in known if STATES[int(logged[v.step])] != v.state]
    if not others:
        return []
    return [
        f"The run's own monitor judged {len(others)} of {len(known)} steps differently (first: "
        f"step {others[0]}): it had other thresholds or another clip limit, which --set and "
        "--grad-clip can name here."
    ]


def ranges(steps: tuple[int, ...], most: int = 5) -> str:
    """Steps as ranges.

    >>> ranges((5, 8, 9, 10)), ranges(())
    ('5, 8-10', '')
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    shown = ["-".join(map(str, run)) for run in runs[:most]]
    rest = sum(run[-1] - run[0] + 1 for run in runs[most:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
