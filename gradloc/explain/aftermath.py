# SPDX-License-Identifier: Apache-2.0
"""Judge whether a spike hurt the run, by its metrics before and after the step. Pure functions.

A metric is worse where its median after the step is off its median before by three times its own spread, and by a
size that matters. Medians, so that another spike nearby does not decide.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..record import Event
from .numbers import number
from .story import step_cause
from .text import capitalized, listed, plural

BEFORE, AFTER = 20, 10
"""Steps compared on either side of the event."""
_LEAST = 3
"""Fewest steps on either side that allow a verdict."""
_SPREADS = 3.0
_MAD = 1.4826
"""Standard deviation of normal noise over its median absolute deviation."""

Series = Callable[[str], Sequence[tuple[int, float]]]
"""A metric's name -> its steps and finite values; empty where the run has no such metric."""

_METRICS = {
    "norm": ("{model}/grad_norm_max", "{model}/grad_norm"),
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "KL": ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
}
"""Metrics that an update can hurt; the first name that the run logs counts."""
_MULTIPLES = {"norm": (0.0, 3.0), "entropy": (0.5, 2.0), "KL": (0.0, 3.0)}
"""Smallest and largest healthy multiple of the value before."""
_REWARD_FALL = 0.1
"""Largest healthy fall of the reward, as a share of its size, since a reward may be negative."""


@dataclass(frozen=True)
class Aftermath:
    """One metric around the event."""

    title: str
    points: tuple[tuple[int, float], ...]
    """Steps and values, the event's own step included."""
    before: float
    """Median before the event."""
    after: float | None
    """Median after the event; None where there are too few steps yet."""
    is_worse: bool


@dataclass(frozen=True)
class Impact:
    """Whether the spike hurt, and the grounds."""

    answer: str
    """``yes``, ``no``, ``not yet known``, or ``not known`` where the norm alone is logged."""
    why: str
    """The grounds, in sentences."""
    parts: tuple[Aftermath, ...] = ()


def impact_of(event: Event, series: Series) -> Impact:
    """Judge from the run's metrics whether an event hurt the run."""
    step, norm, cause = event.step.global_step, event.trigger.grad_norm, step_cause(event)
    model = event.model or "actor"
    parts = tuple(part for title in _METRICS if (part := _part(title, series, step, model)) is not None)
    known = [part for part in parts if part.after is not None]
    worse = [part for part in known if part.is_worse]
    if cause and cause.label == "non_finite_weights":
        return Impact("yes", "The weights are not finite: no later step can be.", parts)
    taken, consequence = event.action.taken, event.consequence
    is_skipped = taken in ("skip", "abort")
    is_not_finite = norm is not None and not math.isfinite(norm) and taken not in ("mask", "heal")
    if is_not_finite and not is_skipped and consequence is not None and consequence.is_taken:
        return Impact("yes", "The optimizer took a step that is not finite.", parts)
    if worse:
        return Impact("yes", " ".join(_change(part) for part in worse), parts)
    if is_skipped or is_not_finite:
        return Impact("no", "The step was not taken.", parts)
    if [part.title for part in known] == ["norm"]:  # under Adam, the norm may not show a spike's damage
        (norms,) = known
        change = f"from {number(norms.before, 3)} to {number(norms.after, 3)}"
        return Impact("not known", f"The norm went on as before, {change}. No loss or reward is logged here.", parts)
    if known:
        titles = capitalized(listed([part.title for part in known]))
        return Impact("no", f"{titles} went on as before.", parts)
    if parts:
        num_steps = max(sum(at > step for at, _ in part.points) for part in parts)
        return Impact("not yet known", f"{plural(num_steps, 'step')} since; {_LEAST} are needed.", parts)
    return Impact("not yet known", "There are no metrics around this step.")


def _part(title: str, series: Series, step: int, model: str) -> Aftermath | None:
    """Compare one metric before and after; None where it has too few values before the event."""
    logged = (series(name.format(model=model)) for name in _METRICS[title])
    points = next(filter(None, logged), ())
    near = tuple((at, value) for at, value in points if step - BEFORE <= at <= step + AFTER)
    before = [value for at, value in near if at < step]
    after = [value for at, value in near if at > step]
    if len(before) < _LEAST or not any(before):
        return None
    usual = statistics.median(before)
    if len(after) < _LEAST:
        return Aftermath(title, near, usual, None, False)
    now = statistics.median(after)
    spread = _SPREADS * _MAD * statistics.median(abs(value - usual) for value in before)
    if title == "reward":
        is_off = now < usual - _REWARD_FALL * max(abs(usual), max(before) - min(before))
    else:
        low, high = _MULTIPLES[title]
        is_off = not low * usual <= now <= high * usual
    return Aftermath(title, near, usual, now, is_off and abs(now - usual) > spread)


def _change(part: Aftermath) -> str:
    verb = "rose" if part.after is not None and part.after > part.before else "fell"
    return f"The {part.title} {verb} from {number(part.before, 3)} to {number(part.after, 3)}."
