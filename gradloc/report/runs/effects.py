# SPDX-License-Identifier: Apache-2.0
"""What an explosion did to the reward, the entropy, the KL and the loss, and since when."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ...explain.aftermath import Aftermath
from ...explain.numbers import number
from ...explain.text import capitalized, plural
from ..logs.recording import Metrics
from ..logs.segments import surviving
from .signals import EFFECTS, LOSS, interval, loss_of
from .spikes import Explosion

LEVEL = 5
"""Values whose median is a metric's level before an explosion, or after it."""
_WITHIN = 30
"""Values after an explosion among which its effects are looked for."""
_DECIDING = {"reward", "loss"}
"""The metrics that decide whether an explosion did harm."""
_MAX_CURVES = 3
"""Small curves around an explosion, at most."""
_NEAR = 20
"""Values before an explosion that show how much a metric scatters. A curve has as many on either side."""


def effects_of(worst: Explosion, since: int | None = None) -> tuple[str, bool | None]:
    """Describe an explosion's effects, and return whether they hurt; None where that is not known.

    ``since`` is the step before which metrics are as usual; its own first one if None.
    """
    metrics, since = surviving(worst.segment), worst.first if since is None else since
    if worst.steps[-1].step == metrics.steps[-1] and worst.first == metrics.steps[-1]:
        name, logged = loss_of(metrics)
        before = [value for step, value in logged if step < worst.first and math.isfinite(value)][-LEVEL:]
        if before and logged[-1][0] == worst.first:
            loss = logged[-1][1]
            if loss > 1.3 * max(before) > 0 or not math.isfinite(loss):
                was = number(median(before), 3)
                return f"{capitalized(name)} is {number(loss)} at that step, and was {was} before.", True
        return f"What this did to the {deciding_metric(metrics)} is not in the log.", None
    changes: list[str] = []
    steady: list[str] = []
    lasting: set[str] = set()
    is_growth = worst.kind == "growth"  # the steps of a growth show their own effects
    within, last = (None, worst.first) if is_growth else (_WITHIN, worst.steps[-1].step)
    for effect in EFFECTS:
        known, title = metrics.known(metrics.first(effect.names)), effect.title
        if effect is LOSS and not loss_of(metrics)[1]:
            continue  # where there is a reward, the loss says nothing
        if effect is LOSS and worst.lost:
            known = [(step, value) for step, value in known if value or step < worst.lost[0]]  # 0 is written for a NaN
        change = _change(known, since, effect.fall, effect.rise, within)
        if change:
            changes.append(f"{title} {change.sentence}")
            if not change.is_back:
                lasting.add(title)
            elif title in _DECIDING:
                steady.append(title)
        elif sum(step > last for step, _ in known) >= LEVEL and title in ("reward", "entropy", "loss"):
            steady.append(title)
    hurt = True if _DECIDING & lasting else None
    if not lasting and _DECIDING & {*steady}:
        hurt = False
    if changes:
        effects = "; ".join(changes)
    elif steady:
        start = metrics.steps.index(worst.first)
        end = None if within is None else start + within + 1
        num_steps = metrics.steps[start:end][-1] - worst.first
        when = "of this growth" if is_growth else "after it"
        effects = f"{' and '.join(steady)} held in the {plural(num_steps, 'step')} {when}"
        before, after = _levels(loss_of(metrics)[1], since, num_steps)
        if after - before > abs(before) / 10 > 0:
            hurt = None
            effects = f"the loss was {number(before, 2)} before it, and {number(after, 2)} in the "
            effects += f"{plural(num_steps, 'step')} {when} (medians)"
    else:
        effects = "the effect is not known, because the log has no reward, entropy or loss"
        if any(metrics.first(effect.names) for effect in EFFECTS):
            effects = f"too few steps follow in the log to see what this did to the {deciding_metric(metrics)}"
    return f"{capitalized(effects)}.", hurt


class _Change(NamedTuple):
    """A metric's change after a step."""

    sentence: str
    is_back: bool
    """Whether it came back."""


def _change(
    known: Sequence[tuple[int, float]], step: int, fall: float | None, rise: float | None, within: int | None = _WITHIN
) -> _Change | None:
    """Return a metric's change in the values after a step, ``within`` of them; None where it only scattered."""
    before = [value for at, value in known if at <= step][-_NEAR:]
    after = [(at, value) for at, value in known if at > step]
    near = after[:within]
    if not before or not near:
        return None
    usual = median(before)
    lower, upper = sorted((usual, median(before[-LEVEL:])))  # the last ones may be the beginning of the change
    scatter = 4 * median(abs(value - usual) for value in before)
    low, high = min(value for _, value in near), max(value for _, value in near)
    lowest = -math.inf if fall is None or upper == 0 else upper - max(scatter, (1 - fall) * abs(upper))
    highest = math.inf if rise is None or lower == 0 else lower + max((rise - 1) * abs(lower), scatter)
    if lower < 0:  # a loss around 0 has no size that it is a multiple of
        highest += scatter
    if low < lowest:
        verb, reached, was = "fell", low, upper
    elif high > highest:
        verb, reached, was = "rose", high, lower
    else:
        return None
    there, most = next((at, value) for at, value in near if abs(value - was) >= 0.9 * abs(reached - was))
    mostly = ", most of it" if number(most, 2) != number(reached, 2) else ""
    change = f"{verb} from {number(was, 2)} to {number(reached, 2)}{mostly} within {plural(there - step, 'step')}"
    ends = [value for _, value in after[-LEVEL:]]
    last = ends[-2:] if len(after) > 3 else ends[-1:]
    are_back = [value >= lowest if verb == "fell" else value <= highest for value in (median(ends), *last)]
    is_back = len(after) > 2 * LEVEL and are_back[0] and reached not in ends or len(after) > 1 and all(are_back[1:])
    earlier = [value for at, value in known if at <= step][-4 * _WITHIN : -_NEAR]
    as_far = sum(value <= reached if verb == "fell" else value >= reached for value in earlier)
    if is_back and as_far > 1:
        return None  # noise that came as far before
    return _Change(f"{change} and came back to {number(median(ends), 2)}" if is_back else change, is_back)


def fall_meanwhile(worst: Explosion) -> str:
    """Say how far the loss fell since an explosion began; empty where it fell by less than a tenth, or rose first."""
    name, losses = loss_of(surviving(worst.segment))
    if _change(losses, worst.first, None, LOSS.rise):
        return ""
    before, after = (
        [loss for step, loss in losses if (step < worst.first) == is_before and math.isfinite(loss)][-LEVEL:]
        for is_before in (True, False)
    )
    if not len(before) == len(after) == LEVEL or not 0 < median(after) < 0.9 * median(before):
        return ""
    return (
        f"{capitalized(name)} fell meanwhile, from {number(median(before), 3)} to {number(median(after), 3)} (medians)."
    )


def loss_at(worst: Explosion) -> list[str]:
    """Name the highest loss of an explosion's own steps, if it is above the ones before them."""
    name, logged = loss_of(surviving(worst.segment))
    before = [value for at, value in logged if at < worst.first and math.isfinite(value)][-LEVEL:]
    own = [(value, at) for at, value in logged if worst.first <= at <= worst.steps[-1].step]
    loss, step = max(own, default=(0.0, 0))
    if len(before) < LEVEL or not loss > 1.2 * max(before) > 0:
        return []
    return [f"{name} is {number(loss, 3)} at step {step}, and was {number(median(before), 3)} before it."]


def begin_of(worst: Explosion, explosions: Sequence[Explosion]) -> int:
    """Return where the explosions begin that lead to this one, without a pause or with a loss that stays higher: its
    effects are measured from there.

    One that did no harm leads to nothing.
    """
    first, pause = worst.first, _NEAR * interval(surviving(worst.segment))
    losses = loss_of(surviving(worst.segment))[1]
    for each in sorted(explosions, key=lambda explosion: -explosion.first):
        if each.segment is not worst.segment or each.first >= first:
            continue
        last = each.steps[-1].step
        before = [loss for step, loss in losses if step < each.first][-_NEAR:]
        since = [loss for step, loss in losses if last < step < first]
        stays = len(since) >= LEVEL <= len(before) and median(since) > 1.5 * median(before) > 0
        if (first <= last + pause or stays) and effects_of(each)[1] is not False:
            first = each.first
    return first


def _levels(losses: Sequence[tuple[int, float]], step: int, num_steps: int) -> tuple[float, float]:
    """Return the median of a loss up to a step, and in the steps after it; 0 and 0 where either is missing."""
    before = [loss for at, loss in losses if at <= step and math.isfinite(loss)][-_NEAR:]
    after = [loss for at, loss in losses if step < at <= step + num_steps and math.isfinite(loss)]
    return (median(before), median(after)) if before and after else (0.0, 0.0)


def aftermath(worst: Explosion) -> list[Aftermath]:
    """Return metrics around an explosion for small curves: reward and entropy, then those that changed, then others."""
    metrics, made = surviving(worst.segment), []
    last = worst.steps[-1].step
    for title, names, fall, rise, _ in EFFECTS:
        known = metrics.known(metrics.first(names))
        before = [point for point in known if point[0] < worst.first][-_NEAR:]
        near = before + [point for point in known if worst.first <= point[0] <= last]
        after = [point for point in known if point[0] > last][:_NEAR]
        change = _change(known, worst.first, fall, rise)
        if len(before) >= 3 and after and len({value for _, value in near + after}) > 1:
            was, now = (median(value for _, value in part[-LEVEL:]) for part in (before, after))
            made.append(Aftermath(title, (*near, *after), was, now, change is not None and not change.is_back))
    made.sort(key=lambda part: (part.title not in ("reward", "entropy"), not part.is_worse))
    return made[:_MAX_CURVES]


def deciding_metric(metrics: Metrics) -> str:
    """Return the metric that decides whether a run is healthy: its reward, else its loss."""
    is_of_rewards = any(name.startswith(("actor/", "critic/")) or "reward" in name for name in metrics.own_names)
    return "loss" if loss_of(metrics)[1] or not is_of_rewards else "reward"
