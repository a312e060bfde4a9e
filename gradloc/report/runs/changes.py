# SPDX-License-Identifier: Apache-2.0
"""Finds where a metric changed for good, jumped, or got worse while another got better."""

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import median
from typing import NamedTuple

from ...explain.numbers import number
from ...explain.text import plural
from ..logs.names import evaluations_of, is_gan_loss, is_training_loss
from ..logs.recording import Metrics
from ..logs.segments import LoggedRun
from .course import best_level
from .health import LOSSES
from .levels import NEAR, Rise, peak, rises, scaled
from .overview import LOSS_SCALE
from .signals import EFFECTS, LOSS, REWARD, Effect, Sign, is_adversarial, is_loss_judged, is_supervised, loss_of

_LEAST_JUMP = 1.4
"""Multiple of the values before it from which a loss has jumped."""
_PEAK = 5.0  # times the level after it: a peak that is reported
_BLOWN = 1000.0
"""Multiple of a loss's first value at which a run that ends there has diverged."""


class _LastingChange(NamedTuple):
    """A change of an effect's metric that lasts to the end of the log."""

    effect: Effect
    own: str
    known: list[tuple[int, float]]
    rise: Rise
    """On the metric's scale; of a fall, on that scale turned over."""
    is_fall: bool

    @property
    def step(self) -> int:
        """The first step that shows it, or the last one before a slow change left the old level for good."""
        return self.known[self.rise.at if self.rise.is_sudden else self.rise.at - 1][0]

    @property
    def verb(self) -> str:
        return "fell" if self.is_fall else "rose"


def _lasting_change(metrics: Metrics, effect: Effect) -> _LastingChange | None:
    """Return an effect's change for good, or a slow one of a reward or loss; None where it has none."""
    name = metrics.first(effect.names)
    if effect is LOSS and not is_loss_judged(metrics):
        return None
    known = metrics.known(name)
    values = [value for _, value in known]
    is_ratio = effect is not REWARD and min(values, default=0.0) >= 0
    scale = scaled(values) if is_ratio else values
    usual = median([abs(b - a) for a, b in pairwise(values)] or [0.0])
    few = 1 if len(values) >= 2 * NEAR else 2  # a short log shows little of what is usual
    first = 0 if effect is LOSS else NEAR  # a KL begins at 0, and a reward changes the most in a run's first steps
    for is_fall, factor in zip((True, False), effect.collapse, strict=True):
        for rise in rises([-value for value in scale] if is_fall else scale) if factor else ():
            least = abs(math.log(factor)) if is_ratio else max(abs((factor - 1) * rise.was), 2 * usual)
            is_large = rise.odds >= 1 and rise.size >= few * least and rise.at >= first
            if is_large and (rise.is_sudden or effect in (REWARD, LOSS)):
                return _LastingChange(effect, metrics.own(name), known, rise, is_fall)
    return None


def lasting(metrics: Metrics) -> Sign | None:
    """Find the first change for good."""
    changes = sorted(filter(None, (_lasting_change(metrics, effect) for effect in EFFECTS)), key=attrgetter("step"))
    if not changes:
        return None
    first, *others = changes
    own, known, rise, step = first.own, first.known, first.rise, first.step
    values = [value for _, value in known]
    if not rise.is_sudden:
        was = median(values[max(rise.at - NEAR, rise.low.start) : rise.at])
        now = median(values[-max(len(rise.low) // 3, NEAR) :])
        if (
            first.effect is REWARD
            and (best := best_level([(step, -value) for step, value in known]))
            and -best[0] > was
        ):
            was, step = -best[0], best[1]  # it may have begun to fall long before it fell this far
        at = (min if first.is_fall else max)(range(rise.at, len(values)), key=values.__getitem__)
        what, worst = "low" if first.is_fall else "peak", values[at]
        way = f", after a {what} of {number(worst, 2)}" if abs(worst - was) > 1.5 * abs(now - was) else ""
        change = f"from {number(was, 2)} around step {step} to {number(now, 2)} at the end{way}"
        if at >= len(values) - 2:
            change = f"from {number(was, 2)} around step {step} to {number(worst, 3)} at step {known[at][0]}"
        if first.effect is LOSS and (fell := _evaluation_that_fell(metrics, own)):
            advice = "Look at how the loss is made, such as by a weight or a curriculum that grows."
            return Sign("fell", f"{own} {first.verb} {change}, while {fell}.", advice, step)
        return Sign("fell", f"{own} {first.verb} {change}.", "", step, step + 1)
    before_it = known[rise.at - 1][0]
    was, now = median(values[max(rise.at - NEAR, rise.low.start) : rise.at]), median(values[rise.at :])
    between = f"at step {step}" if step - before_it <= 1 else f"between steps {before_it} and {step}"
    until = "did not come back" if len(values) - rise.at >= NEAR else "was not back at the end of the log"
    sentence = f"{own} {first.verb} {between} and {until}: {number(was, 2)} before, {number(now, 2)} after (medians)"
    also = [f"{other.effect.title} from step {other.step}" for other in others]
    sentence += f"; {' and '.join(also)}, too" if also else ""
    top, highest = max(known[rise.at :], key=itemgetter(1))
    kind = "collapse" if first.effect is LOSS and highest > _PEAK * now > 0 else "fell"
    sentence += f"; it peaked at {number(highest, 3)} at step {top}" if kind == "collapse" else ""
    return Sign(kind, f"{sentence}.", "", step, before_it + 1)


def _evaluation_that_fell(metrics: Metrics, name: str) -> str:
    """Say how far an evaluation of a loss fell; empty where none did."""
    for own in evaluations_of(name, metrics.own_names):
        values = [value for _, value in metrics.known(own)]
        if len(values) >= NEAR and median(values[-3:]) < 0.8 * median(values[:3]) and min(values) >= 0:
            return f"{own} fell from {number(values[0], 3)} to {number(values[-1], 3)}"
    return ""


def overfitted(metrics: Metrics) -> Sign | None:
    """Find an evaluation that has got worse for a third of its values or more, while the loss of training fell."""
    name, losses = loss_of(metrics)
    own = evaluations_of(name, metrics.own_names) if name and not is_adversarial(metrics) else []
    found = [(each, step) for each in own if (step := _turn(metrics.known(each), losses)) is not None]
    if not found or 2 * len(found) <= len(own):
        return None
    first, step = found[0]
    known = metrics.known(first)
    more = f" {plural(len(found) - 1, 'other evaluation')} rose as well." if len(found) > 1 else ""
    sentence = f"{first} was lowest at step {step}, {number(dict(known)[step], 3)}, and is {number(known[-1][1], 3)} "
    sentence += f"at step {known[-1][0]}, while {name} fell on: the run overfits.{more}"
    return Sign("overfit", sentence, f"Take the checkpoint of about step {step}.", step)


def _turn(known: Sequence[tuple[int, float]], losses: Sequence[tuple[int, float]]) -> int | None:
    """Return the step from which an evaluation got worse while the losses of training fell; None where it did not."""
    if len(known) < _EVALUATIONS:
        return None
    at = min(range(len(known)), key=lambda at: known[at][1])
    step, end = known[at][0], median(value for _, value in known[-3:])
    usual = median(value for _, value in known[max(at - 1, 0) : at + 2])
    if 3 * at > 2 * len(known) or not end > _WORSE * usual > 0:
        return None
    then, now = ([loss for each, loss in losses if is_then(each)] for is_then in (step.__ge__, step.__lt__))
    is_learning = then and now and median(now[-NEAR:]) < 0.95 * median(then[-NEAR:])
    return step if is_learning else None


_EVALUATIONS, _WORSE = 5, 1.15
"""Least evaluations, and how many times the lowest one an evaluation is that has got worse."""


def scale_fell(run: LoggedRun) -> Sign | None:
    """Find that a loss scale fell far within a few rows, where no line says that steps were skipped."""
    metrics = run.metrics
    name = next((name for name in metrics.own_names if LOSS_SCALE.search(name)), "")
    known = metrics.known(name)
    for at in range(_SETTLED + 1, len(known) if not run.skips else 0):
        since, high = max(known[max(at - 5 * NEAR, _SETTLED) : at], key=lambda row: (row[1], row[0]))
        if high >= _FAR_DOWN * known[at][1] > 0:
            low, value = min(known[at : at + 5 * NEAR], key=itemgetter(1))
            sentence = f"{name} fell from {number(high)} at step {since} to {number(value)} at step {low}: fp16's "
            sentence += "scaler halves it when a gradient overflows, and skips that step."
            return Sign("skipped", sentence, "Train in bf16 with the weights in fp32.", since)
    return None


_SETTLED, _FAR_DOWN = 20, 64.0
"""Rows in which a scaler looks for its scale, and the fall that says that it lost it."""


def _epoch_starts(metrics: Metrics, steps: Sequence[int]) -> set[int]:
    """Return the places of steps that begin an epoch, where a loss that is a mean over the epoch begins anew."""
    name = next((name for name in metrics.series if name.lower() == "epoch"), "")
    at_step = dict(metrics.known(name))
    epochs = [int(at_step.get(step, -1)) for step in steps]
    starts = {at for at, (before, epoch) in enumerate(pairwise(epochs), 1) if before < epoch}
    return starts if len(epochs) >= NEAR * len(starts) else set()


def jumped(metrics: Metrics) -> Sign | None:
    """Find the highest jump of a supervised run's loss above the values before it, if it is one of a few."""
    name = metrics.first(LOSSES)
    own, known = metrics.own(name), metrics.known(name)
    values = [value for _, value in known]
    if not is_supervised(metrics) or not is_loss_judged(metrics) or min(values, default=-1.0) < 0:
        return None
    starts = _epoch_starts(metrics, [step for step, _ in known])
    found = peak(scaled(values), starts)
    if found is None or not found.is_odd or found.size < math.log(_LEAST_JUMP):
        return None
    was, begin = median(values[found.at - NEAR : found.at]), found.at
    while values[begin - 1] > 1.3 * was and begin > 1:
        begin -= 1
    before = values[max(begin - NEAR, 0) : begin]
    was = median(before)
    usual = max(sorted(before)[-2:][0], 1.1 * was)
    back = next((at for at in range(found.at + 1, len(values)) if values[at] <= usual), None)
    end = "is not back at the end of the log" if back is None else f"was back at step {known[back][0]}"
    at = max(range(begin, len(values) if back is None else back), key=values.__getitem__)
    step, times = known[at][0], f"{number(values[at] / was, 2)} times the" if was else "from"
    sentence = f"{own} jumped to {number(values[at], 3)} at step {step}, {times} {number(was, 3)} before it, and {end}."
    if back is not None and (more := _more_jumps(values, {*starts, *range(begin, back)})):
        listed = ", ".join(f"{number(values[other], 3)} at step {known[other][0]}" for other in more)
        sentence += f" {plural(len(more), 'other jump')}: {listed}."
    again = _again(values, at, back)
    if again is not None:
        sentence += (
            f" It fell to {number(min(values[at:again]), 3)} and jumped again, to {number(values[again], 3)} at "
        )
        sentence += f"step {known[again][0]}."
    if back is None:
        sentence += f" It began at step {known[begin][0]}." if begin < at else ""
        return Sign("loss", sentence, "", step, known[begin - 1][0] + 1)
    norm = "" if metrics.norm else " Log the gradient norm: it shows a jump like this at the step that causes it."
    advice = f"No need to resume.{norm}"
    return Sign("loss", sentence, advice, step)


def burst(metrics: Metrics) -> Sign | None:
    """Find a GAN's loss that is a thousand times its usual size for a while, after its first rows."""
    for name in filter(is_gan_loss, metrics.own_names):
        known = metrics.known(name)
        usual = median([abs(value) for _, value in known] or [0.0])
        far = [row for row in known[NEAR:] if abs(row[1]) > _BLOWN * usual > 0]
        if far and known[-1] is not far[-1]:
            step, top = max(far, key=lambda row: abs(row[1]))
            back = next(at for at, value in known if at > step and abs(value) <= _BLOWN * usual)
            sentence = f"{name} is over {_BLOWN:,.0f} times its usual size in {plural(len(far), 'row')}, the largest "
            sentence += f"{number(top, 3)} at step {step}; it was back at step {back}."
            return Sign("loss", sentence, "No need to resume.", far[0][0])
    return None


def _more_jumps(values: Sequence[float], left_out: set[int]) -> list[int]:
    """Return the places of up to three further jumps that are apart from all other peaks, in order."""
    found: list[int] = []
    scale = scaled(values)
    while len(found) < 3 and (other := peak(scale, left_out)) and other.is_odd and other.size >= math.log(_LEAST_JUMP):
        found.append(other.at)
        left_out |= {*range(other.at - NEAR, other.at + NEAR)}
    return sorted(found)


def _again(values: Sequence[float], at: int, back: int | None) -> int | None:
    """Return the place of a second jump before a loss is back, to over three times what it had come down to."""
    low, found = values[at], None
    for place in range(at + 1, len(values) if back is None else back):
        low = min(low, values[place])
        if values[place] > 3 * low > 0 and (found is None or values[place] > values[found]):
            found = place
    return found


def blown_up(metrics: Metrics) -> Sign | None:
    """Find a loss, of a part of the model or of all, that ends at over a thousand times its first value."""
    for name in filter(is_training_loss, metrics.own_names):
        known = metrics.known(name)
        times = known[-1][1] / known[0][1] if known and known[0][1] > 0 else 0.0
        if times > _BLOWN and known[-1][1] > 1:
            step = next(step for step, value in known if value > 10 * known[0][1])
            before = max(earlier for earlier, _ in known if earlier < step) + 1
            sentence = (
                f"{name} rose from {number(known[0][1], 3)} at step {known[0][0]} to {number(known[-1][1], 3)} at step "
                f"{known[-1][0]}, the last."
            )
            return Sign("fell", sentence, "", step, before)
    return None
