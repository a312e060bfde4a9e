# SPDX-License-Identifier: Apache-2.0
"""Finds a run's spikes by its log, and their kind: a spike and back, a new level, growth, clipped, zeros.

Norms go through the trigger's adaptive rule, as in training. A log has one norm for each step, so the
rule sees one mini-batch position: the largest norm where the run logged it, else the mean over the step's mini-batches.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import linear_regression, median

from ...explain.numbers import number
from ...explain.text import plural
from ...trigger import AdaptiveThreshold
from ..logs.names import is_norm, is_training_loss, listed
from ..logs.recording import MEAN, Metrics
from ..logs.segments import LoggedRun, Segment, surviving
from .health import ranges
from .signals import interval

EARLY = 10.0
"""Multiple of the others' median from which a norm is a spike while the rule has no threshold yet."""


@dataclass(frozen=True, slots=True)
class Judged:
    step: int
    norm: float
    threshold: float | None
    """The rule's threshold; None during the warm-up."""
    spike: bool
    typical: float | None = None
    """Normal norm: the rule's level; during the warm-up the median of the norms before it."""
    is_early: bool = False
    """Whether it is a spike by its size during the warm-up, when the rule cannot flag it."""

    @property
    def ratio(self) -> float | None:
        return self.norm / self.threshold if self.threshold else None

    @property
    def times(self) -> float | None:
        """Return the norm as a multiple of the normal one."""
        return self.norm / self.typical if self.typical and math.isfinite(self.norm) else None

    @property
    def stands_out(self) -> bool:
        return self.spike or self.is_early


def missing_norm(metrics: Metrics, name: str) -> str:
    """Explain that a run has no gradient norm, or several; empty where it has one."""
    if metrics.norm is not None:
        return ""
    known = [own for own in metrics.own_names if is_norm(own)]
    if known:
        peaks = {own: max(metrics.known(own), key=lambda point: point[1], default=(0, 0.0)) for own in known}
        usual = {own: median(metrics.finite(own) or [1.0]) or 1.0 for own in known}
        odd = max(known, key=lambda own: peaks[own][1] / usual[own])
        step, peak = peaks[odd]
        return (
            f"{name} has several gradient norms; {odd} stands out the most: {number(peak, 3)} at step {step}, "
            f"{number(peak / usual[odd], 3)} times its median. Name one with --metric: {listed(known)}."
        )
    others = [own for own in metrics.own_names if _MAYBE_NORM.search(own) and not is_training_loss(own)]
    if not others:
        return f"{name} logs no gradient norm. If the norm has another name, give it: --metric NAME."
    return f"{name} logs no gradient norm. If one of these is the norm, name it with --metric: {listed(others)}."


_MAYBE_NORM = re.compile(r"norm|grad|magnitude", re.IGNORECASE)
"""In the names of what may be a gradient norm."""


def judge_run(run: LoggedRun, settings: Mapping[str, float] | None = None) -> list[list[Judged]]:
    """Judge the norms of each segment of a run; a segment that continues another has that one's history."""
    settings, judged = settings or {}, []
    for segment in run.segments:
        metrics, rule, steps = surviving(segment), AdaptiveThreshold(**settings), []
        for step, norm in metrics.logged(metrics.norm or MEAN):
            threshold, typical = rule.threshold(0), rule.summary(0).median_norm
            steps.append(Judged(step, norm, threshold, rule.observe([norm])[0], typical))
        steps = _judge_warmup(steps, window=int(settings.get("window", 64)))
        judged.append([step for step in steps if step.step >= segment.first])
    return judged


def _judge_warmup(judged: list[Judged], window: int) -> list[Judged]:
    """Judge the steps of the warm-up by the norms before them, the first three by all others.

    Norms after a spike may be its effect, so they do not define what is normal. A spike has to be three times the
    largest norm before it, so that a rise is none.
    """
    norms = sorted(j.norm for j in judged[:window] if 0 < j.norm < math.inf)
    before: list[float] = []
    for at, j in enumerate(judged[:window]):
        if j.threshold is None and 0 < j.norm < math.inf and len(norms) > 3:  # fewer say nothing
            others = list(norms)
            others.remove(j.norm)
            typical = median(before if len(before) >= 3 else others)
            is_jump = len(before) < 3 or j.norm >= 3 * max(before)
            judged[at] = replace(j, typical=typical, is_early=is_jump and j.norm >= EARLY * typical)
        if 0 < j.norm < math.inf and not judged[at].is_early:
            before.append(j.norm)
    return judged


# ---- kinds of explosions

KINDS = {
    "back": "a spike, and back",
    "collapse": "a spike, and the run did not recover",
    "level": "a new level",
    "learning": "a norm that rises while the loss falls",
    "growth": "growth",
    "lost": "no recovery from NaN or infinity",
    "end": "the log ends at the spike",
    "start": "the first steps",
    "clipped": "clipped before logging",
    "zero": "zero norms",
    "unfinite": "a metric is not finite",
    "skipped": "skipped steps",
    "vanish": "the gradient vanishes",
    "rate": "a learning rate of 0",
    "height": "norms too large to train at",
    "fell": "a collapse or divergence without a spike",
    "loss": "a spike of the loss",
    "overfit": "overfitting",
}
"""Kinds of explosions with their titles."""
LOST_AND_BACK = "NaN or infinity, and back"
"""The title of a kind ``back`` without a finite norm."""
UNRECOVERED = {"collapse", "level", "growth", "lost", "end", "zero", "vanish", "rate", "height", "fell"}
"""The kinds with which a run ends as it is not to be."""
HARMLESS = {"start", "learning"}
"""The kinds that are no fault."""
LEVEL = 3.0
"""Multiple of the normal norm above which norms are a new level."""
LASTING = 8
"""Least values of a level."""
RISING = 5
"""Least values of a growth."""
GROWTH = 10.0
"""Growth factor that counts as growth."""


@dataclass(frozen=True)
class Explosion:
    """Steps in a row that are spikes, or in which norms grow."""

    segment: Segment
    steps: tuple[Judged, ...]
    is_start: bool = False
    """Whether the run begins with it: norms often start high."""
    kind: str = "back"
    """One of :data:`KINDS`."""
    level: float | None = None
    """Median norm after it, where norms stayed high."""
    high_until: int | None = None
    """The last step of norms that stayed high, and then came back."""
    doubling: float | None = None
    """Steps in which a norm doubles, for growth."""

    @property
    def first(self) -> int:
        return self.steps[0].step

    @cached_property
    def peak(self) -> Judged:
        """Return the largest finite norm; the first step, where none is finite."""
        finite = [j for j in self.steps if math.isfinite(j.norm)]
        return max(finite, key=lambda j: j.norm, default=self.steps[0])

    @property
    def label(self) -> str:
        """The kind in words."""
        is_lost = self.kind == "back" and not math.isfinite(self.peak.norm)
        return LOST_AND_BACK if is_lost else KINDS[self.kind]

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(j.step for j in self.steps if not math.isfinite(j.norm))

    @property
    def times(self) -> float:
        """Return the peak as a multiple of the normal norm; inf where no norm is finite."""
        return self.peak.times or math.inf

    @property
    def sentence(self) -> str:
        peak = self.peak
        if self.doubling is not None:
            return (
                f"The gradient norm grows from step {self.first} on: {number(peak.typical, 3)} to "
                f"{number(peak.norm, 3)} at step {peak.step}, doubling every {number(self.doubling, 2)} steps."
            )
        parts = [f"Step {peak.step}: gradient norm {number(peak.norm, 3)}"]
        if peak.times is not None:
            parts[0] += f", {number(peak.times, 3)} times the normal {number(peak.typical, 3)}"
        if self.first != peak.step:
            parts.append(f"The spike began at step {self.first}")
        norms = self.segment.metrics.logged(self.segment.metrics.norm or MEAN)
        after = next((step for step, _ in norms if step > self.steps[-1].step), None)
        again = "" if after is None else f"finite again from step {after} on"
        if self.kind == "lost":
            count = plural(len(self.lost), "step")
            parts.append(f"No norm is finite from step {self.lost[0]} on, to the end of the log ({count})")
        elif self.lost and math.isfinite(peak.norm):
            subject, at = ("The norm was", "step") if len(self.lost) == 1 else ("The norms were", "steps")
            parts.append(f"{subject} not finite at {at} {ranges(self.lost)}")
        elif len(self.lost) > 1:
            stayed = f"It stayed not finite for {plural(len(self.lost), 'step')} ({ranges(self.lost)})"
            parts.append(f"{stayed}, and is {again}" if again else stayed)
        elif self.lost and again:
            parts.append(f"The norm is {again}")
        if self.high_until is not None:
            parts.append(f"The norm stayed high up to step {self.high_until}, and came back")
        elif self.level is not None:
            parts.append(f"The norm stayed high: {number(self.level, 3)} in the median after it")
        return f"{'. '.join(parts)}."


def explosions_of(segment: Segment, judged: Sequence[Judged]) -> list[Explosion]:
    """Find a segment's explosions, each with its kind by the norms alone."""
    groups = [tuple(group) for stands_out, group in groupby(judged, lambda step: step.stands_out) if stands_out]
    is_begun = segment.before is None and segment.first <= 2 * interval(segment.metrics)
    found = [Explosion(segment, g, is_begun and _is_start(g, judged)) for g in groups]
    grown = growth(segment, judged)
    if grown is not None:
        within = range(grown.first, grown.steps[-1].step + 1)
        rate = 1 / (grown.doubling or 1.0)
        begin = grown.peak.typical or 0.0

        def is_part(explosion: Explosion) -> bool:
            trend = begin * 2 ** (rate * (explosion.peak.step - grown.first))
            return explosion.first in within and explosion.peak.norm < GROWTH * trend

        found = [grown, *(explosion for explosion in found if not is_part(explosion))]
    return [explosion if explosion is grown else _with_kind(explosion, judged) for explosion in found]


def _is_start(steps: Sequence[Judged], judged: Sequence[Judged]) -> bool:
    """Return whether a run's first norms are high as first norms are; a row or two of fp16's search may come before, or
    a few that are not as high.
    """
    first = next((step for step in steps[:3] if math.isfinite(step.norm)), steps[0])
    before = judged[: judged.index(steps[0])]
    return first.is_early and len(before) < RISING and all(step.norm > LEVEL * first.typical for step in before)


def _with_kind(explosion: Explosion, judged: Sequence[Judged]) -> Explosion:
    last = explosion.steps[-1]
    later = [step for step in judged if step.step > explosion.peak.step and math.isfinite(step.norm)]
    after = [step.norm for step in later]
    if last is judged[-1] and len(explosion.lost) > 1 and not math.isfinite(last.norm):
        return replace(explosion, kind="lost")
    if explosion.is_start:
        return replace(explosion, kind="start")
    typical = explosion.peak.typical  # while norms stay high, the rule goes on calling them spikes
    stretch = after[:30]
    if typical and len(stretch) >= LASTING:
        level = median(stretch)
        if min(level, median(stretch[-LASTING:])) > LEVEL * typical and min(stretch) > typical:
            if median(after[-LASTING:]) > LEVEL * typical:
                return replace(explosion, kind="level", level=level)
            windows = (at for at in range(len(after)) if median(after[at : at + LASTING]) <= LEVEL * typical)
            return replace(explosion, level=level, high_until=later[next(windows) - 1].step)
    return replace(explosion, kind="end") if not after or last is judged[-1] else explosion


def growth(segment: Segment, judged: Sequence[Judged]) -> Explosion | None:
    """Find norms that grow exponentially without a spike; None where they do not.

    Over medians of five of the norms' logarithms: from the last low one to the highest they must follow a line, and
    stay near its end.
    """
    known = [step for step in judged if 0 < step.norm < math.inf]
    logs = [math.log2(step.norm) for step in known]
    smooth = [median(logs[max(at - 2, 0) : at + 3]) for at in range(len(logs))]
    if len(smooth) <= LASTING:
        return None
    top = max(range(len(smooth)), key=lambda at: smooth[at])
    low = min(smooth[: top + 1])
    rise = smooth[top] - low
    onset = max(at for at in range(top + 1) if smooth[at] <= low + 0.1 * rise)
    if rise < math.log2(GROWTH) or top - onset < RISING or median(smooth[top:]) < smooth[top] - 1:
        return None
    if max(logs[-2:]) < low + rise / 4:  # it is back, which medians of five do not show at the end
        return None
    x, y = [known[at].step for at in range(onset, top + 1)], smooth[onset : top + 1]
    slope, intercept = linear_regression(x, y)
    middle = sum(y) / len(y)
    left = sum((value - slope * step - intercept) ** 2 for step, value in zip(x, y, strict=True))
    if left > 0.1 * sum((value - middle) ** 2 for value in y):
        return None
    at = max(range(onset, len(known)), key=lambda at: known[at].norm if at <= top + 2 else -1.0)
    begin = 2 ** smooth[onset]
    steps = tuple(replace(step, typical=begin) for step in known[onset : at + 1])
    return Explosion(segment, steps, kind="growth", doubling=1 / slope)


def ceiling(steps: Sequence[Judged]) -> str:
    """Say that norms were clipped before they were logged; empty without signs of it.

    A clipped norm is a round number up to rounding, and is the largest. Among norms of many digits one such is enough;
    among coarse ones it must be far commoner than any other.
    """
    norms = [step.norm for step in steps if 0 < step.norm < math.inf]
    if len(norms) < LASTING:
        return ""
    top = max(norms)
    limit = float(f"{top:.1g}")
    at_it = [step.step for step in steps if math.isclose(step.norm, limit, rel_tol=1e-5)]
    if len(at_it) == 1 and not math.isclose(top, limit, rel_tol=2e-6):
        return ""  # as near by chance
    below = [norm for norm in norms if not math.isclose(norm, limit, rel_tol=1e-5)]
    if not math.isclose(top, limit, rel_tol=1e-5) or not below and len(norms) < len(steps):
        return ""  # the only other ones are 0: rounded
    fine = sum(float(f"{norm:.3g}") != norm for norm in below)
    commonest = max(Counter(below).values(), default=0)
    is_plain = fine >= 0.8 * len(below) and len(below) >= LASTING
    if not is_plain and len(at_it) < max(5, 3 * commonest, len(norms) // 10):
        return ""
    where = f"{plural(len(at_it), 'step')} ({ranges(at_it)})"
    verb = "is" if len(at_it) == 1 else "are"
    return (
        f"The norms look clipped before they were logged: {where} {verb} at {number(limit, 3)} and no norm is above "
        "that, so spikes do not show. Log the norm that clipping returns, which is the one before clipping."
    )


_NO_GRADIENT = "Advantages that are all 0, dead units, an empty mask or frozen weights may be the cause."


def zeros(steps: Sequence[Judged], loss: Sequence[float] = ()) -> str:
    """Say that norms are 0, always or from a step on; empty where they are not."""
    if steps and all(step.norm == 0 for step in steps):
        subject = {1: "The one gradient norm is 0", 2: "Both gradient norms are 0"}.get(
            len(steps), f"All {len(steps)} gradient norms are 0"
        )
        if _falls(loss):
            return (
                f"{subject}, yet the loss falls from {number(loss[0], 3)} to {number(loss[-1], 3)}. The run learns, "
                "so the norm is not logged, or logged before it is computed."
            )
        if loss and abs(loss[-1]) > 1e-8:
            return (
                f"{subject}, and the loss is not ({number(loss[-1], 3)} in the last row), so the gradient is lost on "
                "its way. Look for frozen weights, a detached loss, or a norm that is logged before it is computed."
            )
        return f"{subject}, so nothing is learned. {_NO_GRADIENT}"
    count = next((at for at, step in enumerate(reversed(steps)) if step.norm != 0), 0)
    if count < LASTING:
        return ""
    return (
        f"The gradient norm is 0 from step {steps[-count].step} on, to the end of the log ({plural(count, 'step')}), "
        f"so nothing is learned in these steps. {_NO_GRADIENT}"
    )


def _falls(loss: Sequence[float]) -> bool:
    """Return whether a loss falls by a fifth at least."""
    return len(loss) >= LASTING and median(loss[-3:]) < 0.8 * median(loss[:3]) > 0


def clipped_or_zero(judged: Sequence[Sequence[Judged]], loss: Sequence[float] = ()) -> tuple[str, str]:
    """Return the kind and the sentence where norms are 0 to the end or were clipped; else two empty texts."""
    if sentence := zeros(next(filter(None, reversed(judged)), []), loss):
        return "" if _falls(loss) else "zero", sentence
    sentence = ceiling([step for segment in judged for step in segment])
    return ("clipped", sentence) if sentence else ("", "")
