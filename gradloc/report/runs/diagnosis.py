# SPDX-License-Identifier: Apache-2.0
"""What happened in a run of which there is a log alone, in sentences: what exploded, what that did, what to do now."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ...words.numbers import number
from ...words.text import plural
from ..logs.names import listed
from ..logs.segments import LoggedRun, Segment, surviving
from .health import RunHealth, ranges
from .metrics import Metrics
from .trigger import EARLY, Judged, judge_run

AROUND = 5
"""Values whose median stands for the time before an explosion."""
AFTER = 30
"""Steps in which what an explosion did is looked for."""
ON = "+gradloc=observe"
"""Switches GradLoc on in verl."""
STARTS = "The run starts with it, and norms often start high: a spike only if the steps below say so."
OVERWRITTEN = "It was overwritten when the run was resumed: a plot shows the later values."


@dataclass(frozen=True)
class Effect:
    """What a metric did after an explosion."""

    name: str
    metrics: tuple[str, ...]
    falls: float | None
    """A fall to this share of what it was counts."""
    rises: float | None
    """A rise to so many times what it was counts."""


EFFECTS = (
    Effect("reward", ("critic/score/mean", "critic/rewards/mean"), 0.7, None),
    Effect("entropy", ("actor/entropy", "actor/entropy_loss"), 0.5, 2.0),
    Effect("KL to the reference", ("actor/kl_loss", "actor/reward_kl_penalty"), None, 5.0),
    Effect("response length", ("response_length/mean",), 0.5, 1.5),
)


@dataclass(frozen=True)
class Explosion:
    """Steps in a row that are spikes."""

    segment: Segment
    steps: tuple[Judged, ...]
    is_start: bool = False
    """Whether the segment begins with it: norms often start high."""

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
        """Steps with a norm that is not finite."""
        return tuple(j.step for j in self.steps if not math.isfinite(j.norm))

    @property
    def times(self) -> float:
        """The peak in multiples of what was normal; endless where no norm is finite."""
        return self.peak.times or math.inf

    @property
    def sentence(self) -> str:
        """What it was."""
        peak = self.peak
        said = f"Step {peak.step}: gradient norm {number(peak.norm, 3)}"
        if peak.times is not None:
            said += f", {number(peak.times, 3)} times normal ({number(peak.typical, 3)})"
        said += "."
        if self.first != peak.step:
            said += f" It began at step {self.first}."
        if self.lost and math.isfinite(peak.norm):
            verb = "was" if len(self.lost) == 1 else "were"
            said += f" The norm {verb} not finite at {ranges(self.lost)}."
        elif len(self.lost) > 1:
            said += f" It stayed so for {plural(len(self.lost), 'step')} ({ranges(self.lost)})."
        return said


@dataclass
class Diagnosis:
    """What is said of one run."""

    run: LoggedRun
    headline: str
    explosions: list[Explosion] = field(default_factory=list)
    """The worst first."""
    sentences: list[str] = field(default_factory=list)
    """What belongs to the worst: what it did, whether it was overwritten, which tokens, where to resume."""
    command: str = ""
    """What to resume with."""
    limits: list[str] = field(default_factory=list)
    """What the rules could not see, and what was put together or overwritten."""
    judged: list[list[Judged]] = field(default_factory=list)
    """The steps of each segment."""

    @property
    def worst(self) -> Explosion | None:
        return self.explosions[0] if self.explosions else None

    def beside(self, health: RunHealth) -> str:
        """What the health rules say, which have a warm-up of their own: never "healthy" beside an explosion."""
        if self.worst is None or health.num_unwell:
            return health.headline
        return (
            f"No health rule found fault in the {plural(len(health.verdicts), 'step')}: they need more of them first."
        )


def diagnose(run: LoggedRun, settings: Mapping[str, float] | None = None, near: Path | None = None) -> Diagnosis:
    """Say what happened in a run.

    Args:
        run: as it was read.
        settings: of the trigger's rule.
        near: the folder or file that was named; checkpoints are looked for around it.
    """
    if all(segment.metrics.norm is None for segment in run.segments):
        there = listed(run.segments[-1].metrics.own_names)
        headline = f"{run.name} has no gradient norm: --metric NAME takes another metric for it; there is {there}."
        return Diagnosis(run, headline, limits=_overwritten(run))
    judged = judge_run(run, settings)
    found = [
        explosion
        for segment, steps in zip(run.segments, judged, strict=True)
        for explosion in _explosions(segment, steps)
    ]
    found.sort(key=lambda explosion: (not explosion.is_start, len(explosion.lost) > 2, explosion.times), reverse=True)
    made = Diagnosis(run, "", found, judged=judged, limits=[*_limits(judged, settings), *_overwritten(run)])
    if not found:
        made.headline = _calm(judged)
        return made
    worst = found[0]
    made.headline = worst.sentence
    made.sentences = [
        *([STARTS] if worst.is_start else ()),
        *_effects(worst),
        *([OVERWRITTEN] if _is_lost(run, worst) else ()),
        *_others(found),
        _tokens(run.metrics),
    ]
    resume, made.command = _resume(run, worst, near)
    made.sentences.append(resume)
    return made


def _explosions(segment: Segment, judged: Sequence[Judged]) -> list[Explosion]:
    groups: list[list[Judged]] = []
    before = None
    for at, step in enumerate(judged):
        if step.is_told:
            if before == at - 1 and groups:
                groups[-1].append(step)
            else:
                groups.append([step])
            before = at
    is_first = segment.before is None
    return [
        Explosion(segment, tuple(group), is_first and group[0] is judged[0] and group[0].is_early) for group in groups
    ]


def _calm(judged: Sequence[Sequence[Judged]]) -> str:
    """What is said where nothing exploded: how near the largest norm came."""
    steps = [step for segment in judged for step in segment if math.isfinite(step.norm)]
    positive = [step.norm for step in steps if step.norm > 0]
    if not positive:
        return f"All {plural(len(steps), 'gradient norm')} are 0: nothing is learned."
    largest = max(steps, key=lambda step: step.norm)
    normal = median(positive)
    return (
        f"No spike in {plural(len(steps), 'step')}: the largest gradient norm, {number(largest.norm, 3)} at step "
        f"{largest.step}, is {number(largest.norm / normal, 2)} times the run's median of {number(normal, 3)}."
    )


def _limits(judged: Sequence[Sequence[Judged]], settings: Mapping[str, float] | None) -> list[str]:
    warmup = int((settings or {}).get("warmup", 16))
    made = []
    for steps in judged:
        silent = [step for step in steps if step.threshold is None]
        if not silent:
            continue
        told = f"there a norm {EARLY:g} times the median of the others is told."
        if len(silent) == len(steps):
            span = f"All {plural(len(steps), 'step')} from {steps[0].step} on are fewer than the"
            made.append(f"{span} {warmup} norms that the trigger's rule learns from before it flags one: {told}")
        else:
            span = f"Steps {silent[0].step} to {silent[-1].step} are the warm-up of the trigger's rule"
            made.append(f"{span}: {told}")
    return list(dict.fromkeys(made))


def _overwritten(run: LoggedRun) -> list[str]:
    made = []
    for segment, lost in run.overwritten:
        metrics = segment.metrics
        verb = "was" if len(lost) == 1 else "were"
        said = f"{plural(len(lost), 'step')} ({ranges(tuple(lost))}) {verb} logged twice"
        norms = [
            (value, step)
            for step, value in zip(metrics.steps, metrics.get(metrics.norm or ""), strict=True)
            if step >= lost[0] and value is not None
        ]
        if norms:
            peak, step = max(norms, key=lambda entry: (not math.isfinite(entry[0]), entry[0]))
            said += f"; the part that was discarded peaked at {number(peak, 3)} at step {step}"
        made.append(f"The run was resumed: {said}.")
    return made


def _effects(worst: Explosion) -> list[str]:
    """What reward, entropy, KL and length did from the explosion on."""
    metrics = surviving(worst.segment)
    at = metrics.steps.index(worst.first)
    if at == len(metrics.steps) - 1:
        return ["It is the last step of this part of the log: what it did is not known."]
    said, steady = [], []
    for effect in EFFECTS:
        name = next((name for name in effect.metrics if metrics.finite(name)), None)
        if name is None:
            continue
        change = _change(effect, metrics, name, at)
        if change:
            said.append(change)
        elif effect.name in ("reward", "entropy"):
            steady.append(effect.name)
    if said:
        return [f"{said[0][0].upper()}{'; '.join(said)[1:]}."]
    if steady:
        names = " and ".join(steady)
        return [f"{names[0].upper()}{names[1:]} held in the {AFTER} steps after it."]
    return ["Reward and entropy are not in the log: what it did is not known."]


def _change(effect: Effect, metrics: Metrics, name: str, at: int) -> str | None:
    known = metrics.known(name)
    before = [value for step, value in known if step <= metrics.steps[at]][-AROUND:]
    after = [(step, value) for step, value in known if step > metrics.steps[at]]
    near = after[:AFTER]
    if not before or not near:
        return None
    was = median(before)
    scatter = 4 * median(abs(value - was) for value in before)
    low, high = min(value for _, value in near), max(value for _, value in near)
    if effect.falls is not None and was - low > max(scatter, (1 - effect.falls) * abs(was)) and was != 0:
        word, reached = "fell", low
    elif effect.rises is not None and was > 0 and high > max(effect.rises * was, was + scatter):
        word, reached = "rose", high
    else:
        return None
    there = next(step for step, value in near if abs(value - was) >= 0.9 * abs(reached - was))
    within = plural(there - metrics.steps[at], "step")
    said = f"{effect.name} {word} from {number(was, 2)} to {number(reached, 2)} within {within}"
    last = median(value for _, value in after[-AROUND:])
    if len(after) > 2 * AROUND and abs(last - was) < 0.5 * abs(reached - was):
        said += " and came back"
    return said


def _is_lost(run: LoggedRun, explosion: Explosion) -> bool:
    """Whether the run was resumed from before it, and logged its step again."""
    return any(explosion.peak.step in lost for segment, lost in run.overwritten if segment is explosion.segment)


def _others(found: Sequence[Explosion]) -> list[str]:
    others = [explosion for explosion in found[1:] if not explosion.is_start]
    if not others:
        return []
    told = ", ".join(
        f"{other.peak.step} ({number(other.peak.norm, 3)})"
        for other in sorted(others[:6], key=lambda other: other.first)
    )
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return [f"{plural(len(others), 'other spike')}: step {told}{more}."]


def _tokens(metrics: Metrics) -> str:
    if any(name.startswith("gradloc/") for name in metrics.series):
        return "Which tokens: in the events that GradLoc wrote; name the folder that gradloc.dump_dir named."
    return "Which tokens: not known, GradLoc was off."


def _resume(run: LoggedRun, worst: Explosion, near: Path | None) -> tuple[str, str]:
    """Where to go on from, and with which options."""
    before = f"before step {worst.first}"
    if worst.segment is not run.segments[-1] and run.metrics.steps[-1] > worst.peak.step and _is_lost(run, worst):
        return f"The resumed run passed step {worst.peak.step} without it: go on, with GradLoc on for the next one:", ON
    found = _checkpoint(near, worst.first)
    if is_verl(run):
        where = found or f"CHECKPOINTS/global_step_{max(worst.first - 1, 0)}"
        said = f"Resume from {before}" + ("" if found else ", at the newest checkpoint there is,") + " with:"
        return said, f"trainer.resume_mode=resume_path trainer.resume_from_path={where} {ON}"
    return f"Resume from the newest checkpoint {before}{f': {found}' if found else ''}.", ""


def is_verl(run: LoggedRun) -> bool:
    """Whether verl wrote the log: no metric of it had to be renamed, and the norms are the actor's."""
    return run.format.startswith("verl") or "actor/grad_norm" in run.segments[-1].metrics.own_names


def _checkpoint(near: Path | None, before: int) -> str | None:
    """The newest checkpoint of an earlier step beside the log."""
    if near is None or str(near) == "-":
        return None
    folder = near if near.is_dir() else near.parent
    found = [
        (int(step), str(path))
        for depth in ("", "*/", "*/*/", "*/*/*/")
        for pattern in ("global_step_*", "checkpoint-*")
        for path in folder.glob(depth + pattern)
        if (step := path.name.replace("-", "_").rpartition("_")[2]).isdigit() and int(step) < before
    ]
    return max(found)[1] if found else None
