# SPDX-License-Identifier: Apache-2.0
"""Did it hurt: yes, no, or not yet known, from what a run's metrics did after a step against before. Pure.

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
from .text import listed, plural

BEFORE, AFTER = 20, 10
"""Steps around the event that are compared."""
_LEAST = 3
"""Steps on either side that are too few to say."""
_SPREADS = 3.0
_MAD = 1.4826
"""Times the median absolute deviation is a standard deviation of normal noise."""

Series = Callable[[str], Sequence[tuple[int, float]]]
"""The steps and values of a metric, those that are finite; empty where the run has none of that name."""


@dataclass(frozen=True)
class _Watched:
    """A metric that an update can hurt."""

    title: str
    names: tuple[str, ...]
    """The first that the run has."""
    is_scale: bool
    """Whether it is compared as a multiple; else by its difference."""
    limits: tuple[float, float]
    """What it may fall to and rise to, as a multiple of before, or as a difference in parts of its size."""


_WATCHED = (
    _Watched("norm", ("{model}/grad_norm_max", "{model}/grad_norm"), True, (0.0, 3.0)),
    _Watched("reward", ("critic/score/mean", "critic/rewards/mean"), False, (0.1, math.inf)),
    _Watched("entropy", ("actor/entropy", "actor/entropy_loss"), True, (0.5, 2.0)),
    _Watched("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), True, (0.0, 3.0)),
)


@dataclass(frozen=True)
class Part:
    """One metric around the event."""

    title: str
    points: tuple[tuple[int, float], ...]
    """Steps and values, the event's own step included."""
    before: float
    """Medians."""
    after: float | None
    """None where there are too few steps yet."""
    is_worse: bool


@dataclass(frozen=True)
class Hurt:
    """The answer and what it rests on."""

    answer: str
    """``yes``, ``no`` or ``not yet known``."""
    why: str
    """Sentences."""
    parts: tuple[Part, ...] = ()


def did_it_hurt(event: Event, series: Series) -> Hurt:
    """Answer for one event from its run's metrics."""
    step = event.step.global_step
    parts = [part for watched in _WATCHED if (part := _part(watched, series, step, event.model or "actor"))]
    known = [part for part in parts if part.after is not None]
    cause = step_cause(event)
    if cause and cause.label == "non_finite_weights":
        return Hurt("yes", "The weights are not finite: no later step can be.", tuple(parts))
    worse = [part for part in known if part.is_worse]
    if worse:
        return Hurt("yes", " ".join(_went(part) for part in worse), tuple(parts))
    norm = event.trigger.grad_norm
    if event.action.taken in ("skip", "abort") or (norm is not None and not math.isfinite(norm)):
        return Hurt("no", "The step was not taken.", tuple(parts))
    if known:
        said = listed([part.title for part in known])
        return Hurt("no", f"{said[0].upper()}{said[1:]} went on as before.", tuple(parts))
    if parts:
        num = max(sum(at > step for at, _ in part.points) for part in parts)
        return Hurt("not yet known", f"{plural(num, 'step')} since; it takes {_LEAST}.", tuple(parts))
    return Hurt("not yet known", "There are no metrics around this step.")


def _part(watched: _Watched, series: Series, step: int, model: str) -> Part | None:
    """None where too little is known of before."""
    found = next((values for name in watched.names if (values := series(name.format(model=model)))), ())
    near = tuple((at, value) for at, value in found if step - BEFORE <= at <= step + AFTER)
    before, after = [value for at, value in near if at < step], [value for at, value in near if at > step]
    if len(before) < _LEAST or not any(before):
        return None
    usual = statistics.median(before)
    if len(after) < _LEAST:
        return Part(watched.title, near, usual, None, False)
    now = statistics.median(after)
    low, high = watched.limits
    spread = _SPREADS * _MAD * statistics.median(abs(value - usual) for value in before)
    if watched.is_scale:
        is_off = not low * usual <= now <= high * usual
    else:
        size = max(abs(usual), max(before) - min(before))
        is_off = now < usual - low * size or now > usual + high * size
    return Part(watched.title, near, usual, now, is_off and abs(now - usual) > spread)


def _went(part: Part) -> str:
    way = "rose" if part.after is not None and part.after > part.before else "fell"
    return f"The {part.title} {way} from {number(part.before, 3)} to {number(part.after, 3)}."
