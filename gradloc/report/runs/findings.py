# SPDX-License-Identifier: Apache-2.0
"""Finds what is wrong with a run apart from single norms: what is not finite, skipped, zero, or changed."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import median, median_low

from ...explain.numbers import number
from ...explain.text import numbered, plural
from ...health.rules import VALUE_LOSS
from ..logs.names import is_training_loss
from ..logs.recording import SKIPPED, Metrics, Skip
from ..logs.segments import LoggedRun
from .changes import blown_up, burst, jumped, lasting, overfitted, scale_fell
from .health import LOSSES, ranges
from .levels import NEAR
from .overview import RATE
from .signals import EARLIER, EFFECTS, LOSS, Sign, begins, from_start, is_adversarial, is_supervised, loss_of, onset

_VANISHED = 1e-3
"""A loss below this fraction of its first value within ``_SOON`` rows has vanished, if the norm has as well."""
_SOON, _BESIDES = 20, 30.0
_USUAL_SCALE = 2**15
"""Scalers begin at twice this scale, or far above it."""
_FIRST_SCALE = 2**20
"""No run goes on at such a loss scale: it is one that a scaler begins with."""
_HEIGHT = 1e5
"""A usual norm of this size is none to train at, where the loss is an ordinary number."""


def findings(run: LoggedRun) -> list[Sign]:
    """Find what is wrong with a run apart from single norms, the surest first."""
    metrics = run.metrics
    zeros = _zeroed(run) or _zeroed_for_a_while(metrics)
    found = [
        *_not_finite(run),
        *_overwritten_nan(run),
        _reported(run),
        _skipped(run),
        zeros,
        _vanished(metrics) or _norm_vanished(metrics),
        _without_rate(metrics),
        _height(metrics),
    ]
    change = None if zeros else lasting(metrics) or jumped(metrics) or blown_up(metrics)
    found += [scale_fell(run), change, overfitted(metrics), burst(metrics)]
    return [finding for finding in found if finding is not None and finding.kind]


def minor_skips(run: LoggedRun) -> list[str]:
    """Note that a few steps were skipped, as fp16's scaler does to find its scale; empty where none were."""
    skips = _skipped(run)
    return [f"{skips.sentence} {skips.advice}".rstrip()] if skips is not None and not skips.kind else []


def _not_finite(run: LoggedRun) -> Iterator[Sign]:
    metrics = run.metrics
    known = {name for effect in EFFECTS for name in effect.names}
    known |= {own for name, own in metrics.called.items() if name != VALUE_LOSS}
    others = [name for name in metrics.own_names if name not in known and is_training_loss(name)]
    others.sort(key=lambda name: next((s for s, v in metrics.logged(name) if not math.isfinite(v)), math.inf))
    found = [(effect.title, effect.names) for effect in (LOSS, *EFFECTS[:-1])]
    is_lost = False
    for title, names in (*found, *(("loss", (name,)) for name in others)):
        kept = [name for name in names if metrics.logged(name)]
        name = next((name for name in kept if len(metrics.known(name)) < len(metrics.logged(name))), "")
        logged = metrics.logged(name)
        lost = [step for step, value in logged if not math.isfinite(value)]
        if not lost or is_lost and title == "loss":
            continue
        is_lost |= title == "loss"
        own = metrics.own(name)
        what = " or ".join(dict.fromkeys(number(value) for _, value in logged if not math.isfinite(value)))
        before = [(step, known) for step, known in logged if step < lost[0]]
        was = f"; it was {number(before[-1][1], 3)} at step {before[-1][0]}" if before else ""
        begin = onset(before, lost[0]) if title == "loss" and loss_of(metrics)[1] else lost[0]
        if begin < lost[0]:
            was += f", and above its level from step {begin} on"
        if lost == [step for step, _ in logged if step >= lost[0]]:
            where = f"from step {lost[0]} on, to the end of the log ({plural(len(lost), 'row')})"
        else:
            where = f"{_at(lost)}, of {plural(len(logged), 'row')}"
        is_resumed = title == "loss" and before and lost[-1] == logged[-1][0]
        after = next((step for step, _ in logged if step > lost[-1]), None)
        was += f" and is finite again from step {after} on" if before and after is not None else ""
        advice = ""
        if not before:
            advice = _repeats(own, title, begins(run)) if after is None else f"From step {after} on it is finite."
        before_it = max((step for step, _ in before if step < begin), default=begin - 1) + 1 if is_resumed else None
        is_back = after is not None
        yield Sign("unfinite", f"{own} is {what} {where}{was}.", advice, lost[0], before_it, is_back)


def _overwritten_nan(run: LoggedRun) -> Iterator[Sign]:
    """Find a loss that was not finite in a part that a resume logged again."""
    for segment, lost in run.overwritten:
        name, logged = loss_of(segment.metrics)
        bad = [step for step, loss in logged if step >= lost[0] and not math.isfinite(loss)]
        after = next((step for step, _ in run.metrics.known(name) if bad and step >= bad[0]), None)
        if after is not None:
            sentence = f"{name} was not finite {_at(bad)}; after a resume it is finite again, from step {after} on."
            is_past = run.metrics.steps[-1] > bad[-1]
            yield Sign("unfinite", sentence, f"The resumed run got past step {bad[-1]}: continue." * is_past, bad[0])


def _reported(run: LoggedRun) -> Sign | None:
    """Find a NaN loss that the trainer reports and no row has."""
    steps = [skip.step for skip in run.skips if skip.is_nan_loss and skip.step is not None]
    if not steps or any(not math.isfinite(value) for _, value in loss_of(run.metrics)[1]):
        return None
    sentence = f"The trainer says that its loss was not finite, {'after' if len({*steps}) == 1 else 'first after'} step"
    return Sign("unfinite", f"{sentence} {steps[0]}.", "", steps[0], steps[0] + 1)


def _repeats(own: str, title: str, begin: str) -> str:
    """Advise on a fault that a log has from its first row on."""
    if begin == "late":
        return EARLIER
    what = f"how {title} is computed"
    if title == "loss":
        what = "precision, learning rate, and the first batch's data and labels"
    return f"{from_start(own, begin)} a restart with the same settings will fail as this one did. Look at {what}."


def _skipped(run: LoggedRun) -> Sign | None:
    """Find steps that the trainer reports as skipped; without a kind where they are few, and no fault."""
    skips = _skips_of(run)
    known = [skip for skip in skips if skip.step is not None and not skip.is_end]
    first, last = (known[0].step, known[-1].step) if known else (None, None)
    where = f", {'after' if known[0].is_after else 'at'} {numbered('step', first, last)}" if known else ""
    if skips and skips[0].row == -1 and skips[0].step is None and run.metrics.steps:
        first = None
        where = f", from before the first row to after step {last}" if known else ", before the first row"
    if overflows := [skip for skip in skips if skip.is_overflow]:
        return _overflowed(run, overflows, where, first, last)
    if not skips:
        return None
    at = {skip.step for skip in known}
    own = {skip.step for skip in known if not skip.is_after}
    norms = [norm for step, norm in run.metrics.known(run.metrics.norm or "") if step in own]
    span = f", at norms of {number(min(norms), 3)} to {number(max(norms), 3)}" if norms else ""
    span = f", at a norm of {number(norms[0], 3)}" if len(norms) == 1 else span
    sentence = f"The trainer says that it skipped the optimizer step {plural(len(skips), 'time')}{where}{span}."
    if all(skip.is_lost for skip in skips):
        sentence = f"{sentence[:-1]}, because the norm was not finite."
        advice = "Nothing is learned in a step that is skipped. If skips go on, look at their batches, and train in "
        advice += "bf16 with the weights in fp32."
        return Sign("skipped", sentence, advice, first)
    if len(at) >= len(run.metrics.steps) > 1:
        advice = (
            "A skipped step leaves the weights as they are, so the next is skipped as well. Raise the trainer's limit "
            "on the norm above these norms, or go back to before the first skipped step."
        )
        return Sign("skipped", sentence, advice, first)
    if len(skips) < 3 and (run.metrics.norms or loss_of(run.metrics)[1]):
        return Sign("", sentence, "", first)
    return Sign("skipped", sentence, "Compare the trainer's limit on the norm with the norms of these steps.", first)


def _overflowed(run: LoggedRun, skips: Sequence[Skip], where: str, first: int | None, last: int | None) -> Sign:
    """Separate overflows of fp16 that are a fault from its scaler's search for a scale."""
    scales = [scale for skip in skips for scale in (skip.before, skip.scale) if scale is not None]
    count, steps = sum(not skip.is_end for skip in skips), run.metrics.steps
    is_end = count < len(skips)
    has_rows = bool(run.metrics.norms or loss_of(run.metrics)[1])
    begin = skips[0].before
    fell = f" from {number(begin)}" if begin is not None else ""
    fell = f"; the loss scale fell{fell} to {number(min(scales))}" if scales and min(scales) != begin else ""
    end = ", and can fall no further, so the run ends there" if is_end else ""
    sentence = f"fp16 overflowed {plural(count, 'time')}{where}{fell}{end}. Each step that overflowed was skipped."
    if not count:
        sentence = "The loss scale fell to its minimum, and the run ended, because every step had overflowed."
    # the scaler of a new run halves a scale that is far too large, once a step
    is_early = begins(run) == "start" or scales[:1] >= [_FIRST_SCALE]
    is_sound = scales[-1:] > [100] or scales[-1:] >= [1] and (last or 0) <= steps[0]
    is_search = is_early and count < steps[-1] and (first or 0) <= steps[0] and is_sound
    after = steps[-1] - (last or steps[0])
    is_past = has_rows and (is_search or after >= (3 if is_early and (first or 0) < 10 else 10) * count)
    is_over = not is_end and (count < 3 and min(scales, default=1) >= 1 or is_past)
    advice = "A few skipped steps are normal while the scaler finds its scale."
    if not has_rows and not is_end and len(scales) > 1 and scales[0] >= _USUAL_SCALE and scales[-1] > 100:
        is_over |= count <= math.log2(scales[0] / scales[-1]) + 2
        advice = "A new run's scaler finds its scale like this. Look again if overflows go on at a scale below 100."
    if counts := run.metrics.known(SKIPPED):
        number_of, skipped = counts[-1]
        is_over = not is_end and (number_of >= 10 * skipped or is_past)
        num_skipped = plural(int(skipped), "skipped step")
        sentence = f"fp16 overflowed: the trainer counts {num_skipped} of {number_of:,}{fell}{end}."
    if not is_over:
        advice = "Train in bf16 with the weights in fp32, where the device has bf16. Elsewhere look for what "
        advice += "overflows: the learning rate may be too high, or data may be bad."
    return Sign("" if is_over and has_rows else "skipped", sentence, advice, first)


def _skips_of(run: LoggedRun) -> list[Skip]:
    """Return the skipped steps that the trainer reports, by lines of their own or by a metric that counts them."""
    metrics = run.metrics
    names = (own for own in metrics.own_names if "skipped iter" in own or own in ("skipped", "skipped steps"))
    name = next(names, "")
    counted = metrics.logged(name)
    if name.startswith("skipped") and [*map(itemgetter(1), counted)] == sorted(map(itemgetter(1), counted)):
        # a count of all so far
        counted = counted[:1] + [(step, count - last) for (_, last), (step, count) in pairwise(counted)]
    scales = dict(metrics.logged("loss scale"))
    if run.skips or len(counted) < 2:
        return [skip for skip in run.skips if not skip.is_nan_loss]
    return [
        Skip(step, False, is_overflow=scales.get(step, 1.0) != 1.0, scale=scales.get(step))
        for step, count in counted
        for _ in range(min(int(count), 1000) if count > 0 else 0)
    ]


def _zeroed(run: LoggedRun) -> Sign | None:
    """Find a supervised loss that is exactly 0 to the end, as a Trainer writes a NaN."""
    metrics = run.metrics
    name, logged = loss_of(metrics)
    num_zeros = next((at for at, (_, value) in enumerate(reversed(logged)) if value != 0), len(logged))
    before = logged[: len(logged) - num_zeros]
    is_sudden = before and before[-1][1] > 0.1 and is_supervised(metrics)
    if num_zeros < 2 or not is_sudden or 2 * sum(value == 0 for _, value in before) > len(before):
        return None
    step, (last, was) = logged[-num_zeros][0], before[-1]
    if any(norm != 0 for at, norm in metrics.known(metrics.norm or "") if at >= step):
        return None
    sentence = f"{name} is exactly 0 from step {step} on, and was {number(was, 3)} at step {last}. "
    sentence += "Either the loss was NaN, which a Trainer writes as 0, or nothing is left to predict."
    return Sign("vanish", sentence, "", step, last + 1)


def _zeroed_for_a_while(metrics: Metrics) -> Sign | None:
    """Find rows in which a supervised loss is exactly 0, far from all others, as some loggers write a NaN."""
    name, logged = loss_of(metrics)
    zeros = [step for step, value in logged if value == 0]
    others = [value for _, value in logged if value != 0]
    if len(zeros) < 3 or len(others) < NEAR or is_adversarial(metrics) or not is_supervised(metrics):
        return None
    rounded = max(len(repr(value).partition(".")[2]) for value in others)
    if min(others) < max(median(others) / 20, 20 * 10.0**-rounded):  # small losses are rounded to 0
        return None
    if not any(value for step, value in logged if step < zeros[0]):
        return None
    sentence = f"{name} is exactly 0 {_at(zeros)}, of {plural(len(logged), 'row')}, and never below "
    sentence += f"{number(min(others), 3)} elsewhere: some loggers write 0 for a NaN, as ClearML and a Trainer do."
    return Sign("unfinite", sentence, "", zeros[0], is_back=logged[-1][1] != 0)


def _vanished(metrics: Metrics) -> Sign | None:
    name, _ = loss_of(metrics)
    known = metrics.known(name)[:_SOON]
    norms = [norm for _, norm in metrics.known(metrics.norm or "")][:_SOON]
    if len(known) < 2 or known[0][1] < 0.1 or min(value for _, value in known) < 0:
        return None
    at = next((at for at, (_, value) in enumerate(known) if value <= _VANISHED * known[0][1]), None)
    is_gone = at is not None and max(value for _, value in known[at:]) <= _VANISHED * known[0][1]
    if not is_gone or not norms or norms[-1] > _VANISHED * norms[0]:
        return None
    sentence = (
        f"Loss and gradient vanish: {name} goes from {number(known[0][1], 3)} at step {known[0][0]} to "
        f"{number(known[-1][1], 2)} at step {known[-1][0]}, and the norm from {number(norms[0], 3)} to "
        f"{number(norms[-1], 2)}."
    )
    advice = "Nothing is left to predict, so look at labels and mask. Targets may equal the input, or all be masked."
    return Sign("vanish", sentence, advice, known[at][0] if at is not None else None)


def _norm_vanished(metrics: Metrics) -> Sign | None:
    """Find norms that end far below what they were, and fell far more than the loss."""
    name, losses = loss_of(metrics)
    norms, third = metrics.known(metrics.norm or ""), len(losses) // 3
    if len(norms) < 3 * NEAR or third < NEAR:
        return None
    usual = median(norm for _, norm in norms[: len(norms) // 3])
    step = next((step for step, norm in norms if norm <= _VANISHED * usual), None)
    end = median(norm for _, norm in norms[-NEAR:])
    before, after = (median(loss for _, loss in part) for part in (losses[:third], losses[-third:]))
    if step is None or not 0 < end <= _VANISHED * usual or before <= 0 or after / before < _BESIDES * end / usual:
        return None  # where a loss is fitted, its gradient vanishes with it
    sentence = (
        f"The gradient norm vanishes: {number(usual, 3)} in the median of its first third, below a thousandth of "
    )
    sentence += f"that from step {step} on, {number(end, 2)} at the end; {name} was {number(before, 3)}, and is "
    sentence += f"{number(after, 3)} (medians)."
    return Sign(
        "vanish", sentence, "Nothing is learned any more, so look for what saturates and for frozen weights.", step
    )


def _without_rate(metrics: Metrics) -> Sign | None:
    """Find a learning rate that falls to 0 at once, where the loss has one level from there to the end."""
    name = next((name for name in metrics.own_names if RATE.search(name)), "")
    known = metrics.known(name)
    num_zeros = next((at for at, (_, rate) in enumerate(reversed(known)) if rate != 0), len(known))
    before = [rate for _, rate in known[: len(known) - num_zeros]]
    if num_zeros < max(3 * NEAR, len(known) / 10) or not before or before[-1] < median(before) / 2:
        return None  # a schedule that ends at 0 comes down to it
    step = known[-num_zeros][0]
    own, losses = loss_of(metrics)
    since = [loss for at, loss in losses if at >= step]
    third = len(since) // 3
    if third < NEAR or abs(median(since[:third]) - median(since[-third:])) > abs(median(since)) / 20:
        return None
    sentence = f"{name} is 0 from step {step} on, to the end of the log ({plural(num_zeros, 'row')}), and was "
    sentence += (
        f"{number(before[-1], 3)}: nothing is learned there, and {own} stays at about {number(median(since), 3)}."
    )
    return Sign("rate", sentence, "Look at the schedule: it ends before the run does.", step)


def _height(metrics: Metrics) -> Sign | None:
    norms = metrics.norms
    name = metrics.first(LOSSES)
    losses = [abs(value) for value in metrics.finite(name)]
    if not norms or median_low(norms) < _HEIGHT or not losses or median(losses) > 100:
        return None
    if median_low(norms) < _HEIGHT * median(metrics.finite("loss scale") or [1.0]):
        return None  # it is logged before the division by the loss scale, as DeepSpeed's Megatron did
    sentence = (
        f"{metrics.own_norm} is {number(median_low(norms), 3)} in the median of {plural(len(norms), 'row')}, and "
        f"{metrics.own(name)} is {number(median(losses), 2)}, but no run trains at a norm this large."
    )
    advice = (
        "Look whether the norm is logged before the division by the loss scale or the number of tokens. If not, one "
        "layer's gradient is broken. Log the norm of each layer to find that layer."
    )
    return Sign("height", sentence, advice, metrics.steps[0])


def lost_loss(run: LoggedRun, lost: Sequence[int]) -> str:
    """Explain how a trainer logs a NaN loss that is not in the log; empty where that is not known."""
    name, logged = loss_of(run.metrics)
    zeros = [step for step, value in logged if value == 0 and step in lost]
    if zeros:
        return f"{name} is 0 {_at(zeros)}, which is how a Trainer writes a NaN."
    if not logged and run.format.startswith("Megatron"):
        return "The loss is not in these rows, because Megatron leaves out a loss that is NaN."
    return ""


def _at(steps: Sequence[int]) -> str:
    return f"at {'step' if len(steps) == 1 else 'steps'} {ranges(steps)}"
