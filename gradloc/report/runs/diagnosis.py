# SPDX-License-Identifier: Apache-2.0
"""What happened in a run of which there is a log alone, in sentences: what exploded, what that did, what to do now."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ...words.numbers import number
from ...words.text import plural
from ..logs.segments import LoggedRun, Segment, surviving
from .health import RunHealth, ranges
from .trigger import EARLY, Judged, judge_run, missing_norm

AROUND = 5
"""Values whose median stands for the time before an explosion."""
AFTER = 30
"""Steps after an explosion in which its effects are looked for."""
ON = "+gradloc=observe"
"""Switches GradLoc on in verl."""
EFFECTS = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), 0.7, None),
    ("entropy", ("actor/entropy", "actor/entropy_loss"), 0.5, 2.0),
    ("KL to the reference", ("actor/kl_loss", "actor/reward_kl_penalty"), None, 5.0),
    ("response length", ("response_length/mean",), 0.5, 1.5),
)
"""What is watched: its metrics, and the multiples of its earlier value that count as a fall and as a rise."""


@dataclass(frozen=True)
class Explosion:
    """Steps in a row that are spikes."""

    segment: Segment
    steps: tuple[Judged, ...]
    is_start: bool = False
    """Whether the run begins with it: norms often start high."""

    @property
    def first(self) -> int:
        return self.steps[0].step

    @property
    def peak(self) -> Judged:
        """The largest finite norm; the first step, where none is finite."""
        finite = [j for j in self.steps if math.isfinite(j.norm)]
        return max(finite, key=lambda j: j.norm, default=self.steps[0])

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(j.step for j in self.steps if not math.isfinite(j.norm))

    @property
    def times(self) -> float:
        """The peak in multiples of what was normal; inf where no norm is finite."""
        return self.peak.times or math.inf

    @property
    def sentence(self) -> str:
        peak = self.peak
        parts = [f"Step {peak.step}: gradient norm {number(peak.norm, 3)}"]
        if peak.times is not None:
            parts[0] += f", {number(peak.times, 3)} times normal ({number(peak.typical, 3)})"
        if self.first != peak.step:
            parts.append(f"It began at step {self.first}")
        if self.lost and math.isfinite(peak.norm):
            verb = "was" if len(self.lost) == 1 else "were"
            parts.append(f"The norm {verb} not finite at {ranges(self.lost)}")
        elif len(self.lost) > 1:
            parts.append(f"It stayed so for {plural(len(self.lost), 'step')} ({ranges(self.lost)})")
        return f"{'. '.join(parts)}."


@dataclass
class Diagnosis:
    """What a log says of one run."""

    run: LoggedRun
    headline: str
    explosions: list[Explosion] = field(default_factory=list)
    """The worst first."""
    sentences: list[str] = field(default_factory=list)
    """About the worst: what it did, whether it was overwritten, which tokens, where to resume."""
    command: str = ""
    """The options to resume with."""
    limits: list[str] = field(default_factory=list)
    """What the rules could not see, and what was overwritten."""
    judged: list[list[Judged]] = field(default_factory=list)
    """The steps of each segment."""

    @property
    def worst(self) -> Explosion | None:
        return self.explosions[0] if self.explosions else None

    def beside(self, health: RunHealth) -> str:
        """The headline of the health rules, which have a warm-up of their own: never "healthy" beside an explosion."""
        if self.worst is None or health.num_unwell:
            return health.headline
        return (
            f"No health rule found fault in the {plural(len(health.verdicts), 'step')}: they need more of them first."
        )


def diagnose(run: LoggedRun, settings: Mapping[str, float] | None = None, near: Path | None = None) -> Diagnosis:
    """Says what happened in a run.

    Args:
        run: as it was read.
        settings: of the trigger's rule.
        near: the folder or file that the user named; checkpoints are looked for around it.
    """
    if all(part.norm is None for part in run.parts):
        return Diagnosis(run, missing_norm(run.parts[-1], run.name), limits=_overwritten(run))
    judged = judge_run(run, settings)
    explosions = [
        explosion
        for segment, steps in zip(run.segments, judged, strict=True)
        for explosion in _explosions(segment, steps)
    ]
    explosions.sort(key=lambda e: (not e.is_start, len(e.lost) > 2, e.times), reverse=True)
    warmup = int((settings or {}).get("warmup", 16))
    limits = dict.fromkeys(limit for steps in judged for limit in _warmup(steps, warmup))
    made = Diagnosis(run, _calm(judged), explosions, limits=[*limits, *_overwritten(run)], judged=judged)
    if not explosions:
        return made
    worst = explosions[0]
    made.headline = worst.sentence
    if worst.is_start:
        made.sentences.append(
            "The run starts with it, and norms often start high: a spike only if the steps below say so."
        )
    made.sentences.append(_effects(worst))
    if _is_overwritten(run, worst):
        made.sentences.append("It was overwritten when the run was resumed: a plot shows the later values.")
    made.sentences += _others(explosions)
    if any(name.startswith("gradloc/") for name in run.metrics.series):
        tokens = "in the events that GradLoc wrote; name the folder that gradloc.dump_dir named."
    else:
        tokens = "not known, GradLoc was off."
    made.sentences.append(f"Which tokens: {tokens}")
    resume, made.command = _resume(run, worst, near)
    made.sentences.append(resume)
    return made


def _explosions(segment: Segment, judged: Sequence[Judged]) -> list[Explosion]:
    groups: list[list[Judged]] = []
    is_open = False
    for step in judged:
        if step.stands_out and is_open:
            groups[-1].append(step)
        elif step.stands_out:
            groups.append([step])
        is_open = step.stands_out
    is_begun = segment.before is None
    return [Explosion(segment, tuple(g), is_begun and g[0] is judged[0] and g[0].is_early) for g in groups]


def _calm(judged: Sequence[Sequence[Judged]]) -> str:
    """Where nothing exploded: how near the largest norm came."""
    steps = [step for segment in judged for step in segment if math.isfinite(step.norm)]
    positive = [step.norm for step in steps if step.norm > 0]
    if not positive:
        return f"All {plural(len(steps), 'gradient norm')} are 0: nothing is learned."
    largest, normal = max(steps, key=lambda step: step.norm), median(positive)
    return (
        f"No spike in {plural(len(steps), 'step')}: the largest gradient norm, {number(largest.norm, 3)} at step "
        f"{largest.step}, is {number(largest.norm / normal, 2)} times the run's median of {number(normal, 3)}."
    )


def _warmup(steps: Sequence[Judged], warmup: int) -> list[str]:
    """Says in which steps the trigger's rule could not flag a norm."""
    silent = [step.step for step in steps if step.threshold is None]
    if not silent:
        return []
    span = f"Steps {silent[0]} to {silent[-1]} are the warm-up of the trigger's rule"
    if len(silent) == len(steps):
        span = f"All {plural(len(steps), 'step')} from {silent[0]} on are fewer than the {warmup} norms"
        span += " that the trigger's rule learns from before it flags one"
    return [f"{span}: there a norm {EARLY:g} times the median of the others is told."]


def _overwritten(run: LoggedRun) -> list[str]:
    made = []
    for segment, lost in run.overwritten:
        verb = "was" if len(lost) == 1 else "were"
        discarded = ""
        norms = [(norm, step) for step, norm in segment.metrics.logged(segment.metrics.norm or "") if step >= lost[0]]
        if norms:
            peak, step = max(norms, key=lambda entry: (not math.isfinite(entry[0]), entry[0]))
            discarded = f"; the part that was discarded peaked at {number(peak, 3)} at step {step}"
        made.append(
            f"The run was resumed: {plural(len(lost), 'step')} ({ranges(lost)}) {verb} logged twice{discarded}."
        )
    return made


def _effects(worst: Explosion) -> str:
    metrics = surviving(worst.segment)
    if worst.first == metrics.steps[-1]:
        return "It is the last step of this part of the log: what it did is not known."
    changes, steady = [], []
    for effect, names, fall, rise in EFFECTS:
        known = next(filter(None, map(metrics.known, names)), [])
        change = _change(known, worst.first, fall, rise)
        if change:
            changes.append(f"{effect} {change}")
        elif known and effect in ("reward", "entropy"):
            steady.append(effect)
    if changes:
        effects = "; ".join(changes)
    elif steady:
        effects = f"{' and '.join(steady)} held in the {AFTER} steps after it"
    else:
        effects = "reward and entropy are not in the log: what it did is not known"
    return f"{effects[0].upper()}{effects[1:]}."


def _change(known: Sequence[tuple[int, float]], step: int, fall: float | None, rise: float | None) -> str:
    """How far a metric went after a step, and whether it came back; empty where it only scattered."""
    before = [value for at, value in known if at <= step][-AROUND:]
    after = [(at, value) for at, value in known if at > step]
    near = after[:AFTER]
    if not before or not near:
        return ""
    was = median(before)
    scatter = 4 * median(abs(value - was) for value in before)
    low, high = min(value for _, value in near), max(value for _, value in near)
    if fall is not None and was - low > max(scatter, (1 - fall) * abs(was)) and was != 0:
        verb, reached = "fell", low
    elif rise is not None and was > 0 and high > max(rise * was, was + scatter):
        verb, reached = "rose", high
    else:
        return ""
    there = next(at for at, value in near if abs(value - was) >= 0.9 * abs(reached - was))
    change = f"{verb} from {number(was, 2)} to {number(reached, 2)} within {plural(there - step, 'step')}"
    last = median(value for _, value in after[-AROUND:])
    is_back = len(after) > 2 * AROUND and abs(last - was) < 0.5 * abs(reached - was)
    return f"{change} and came back" if is_back else change


def _is_overwritten(run: LoggedRun, explosion: Explosion) -> bool:
    """Whether the run was resumed from before it, and logged its step again."""
    return any(explosion.peak.step in lost for segment, lost in run.overwritten if segment is explosion.segment)


def _others(explosions: Sequence[Explosion]) -> list[str]:
    others = [explosion for explosion in explosions[1:] if not explosion.is_start]
    if not others:
        return []
    shown = sorted(others[:6], key=lambda other: other.first)
    steps = ", ".join(f"{other.peak.step} ({number(other.peak.norm, 3)})" for other in shown)
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return [f"{plural(len(others), 'other spike')}: step {steps}{more}."]


def _resume(run: LoggedRun, worst: Explosion, near: Path | None) -> tuple[str, str]:
    peak = worst.peak.step
    if worst.segment is not run.segments[-1] and run.metrics.steps[-1] > peak and _is_overwritten(run, worst):
        return f"The resumed run passed step {peak} without it: go on, with GradLoc on for the next one:", ON
    checkpoint = _checkpoint(near, worst.first)
    if run.format.startswith("verl") or "actor/grad_norm" in run.parts[-1].own_names:
        where = checkpoint or f"CHECKPOINTS/global_step_{max(worst.first - 1, 0)}"
        newest = "" if checkpoint else ", at the newest checkpoint there is,"
        options = f"trainer.resume_mode=resume_path trainer.resume_from_path={where} {ON}"
        return f"Resume from before step {worst.first}{newest} with:", options
    where = f": {checkpoint}" if checkpoint else ""
    return f"Resume from the newest checkpoint before step {worst.first}{where}.", ""


def _checkpoint(near: Path | None, before: int) -> str | None:
    """The newest checkpoint of an earlier step beside the log."""
    if near is None or str(near) == "-":
        return None
    folder = near if near.is_dir() else near.parent
    known = [
        (int(step), str(path))
        for depth in ("", "*/", "*/*/", "*/*/*/")
        for pattern in ("global_step_*", "checkpoint-*")
        for path in folder.glob(depth + pattern)
        if (step := path.name.replace("-", "_").rpartition("_")[2]).isdigit() and int(step) < before
    ]
    return max(known)[1] if known else None
