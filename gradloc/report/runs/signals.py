# SPDX-License-Identifier: Apache-2.0
"""Judges a run by its loss and other metrics, with or without gradient norms.

Each finding is a kind of :data:`~.spikes.KINDS` and a sentence that names what it was judged from.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import median, median_low
from typing import NamedTuple

from ...explain.numbers import number
from ...explain.text import numbered, plural
from ...health.rules import ENTROPY, LENGTH, REFERENCE_KL, SCORES, VALUE_LOSS
from ..logs.names import evaluation_of, is_training_loss
from ..logs.recording import SKIPPED, Metrics, Skip
from ..logs.segments import LoggedRun
from .course import best_level
from .health import LOSSES, ranges
from .levels import NEAR, Rise, peak, rises, scaled
from .overview import LOSS_SCALE


class Effect(NamedTuple):
    """A metric by which an explosion's effects show; its bounds are multiples of the earlier value."""

    title: str
    names: tuple[str, ...]
    """Names of the metric, by preference."""
    fall: float | None
    rise: float | None
    collapse: tuple[float | None, float | None] = (None, None)
    """The fall and the rise that are a collapse in a run without odd norms."""


REWARD = Effect("reward", SCORES, 0.7, None, collapse=(0.5, None))
LOSS = Effect("loss", LOSSES, None, 1.3, collapse=(None, 1.3))
EFFECTS = (
    REWARD,
    Effect("entropy", ENTROPY, 0.5, 2.0, collapse=(0.25, 4.0)),
    Effect("KL to the reference", REFERENCE_KL, None, 5.0, collapse=(None, 20.0)),
    Effect("mismatch KL", ("rollout_corr/kl",), None, 5.0),
    Effect("response length", (LENGTH,), 0.5, 1.5),
    LOSS,
)
_LEAST_JUMP = 1.4
"""Multiple of the values before it from which a loss has jumped."""
_PEAK = 5.0  # times the level after it: a peak that is reported
ADVERSARIAL = re.compile(
    r"(?i:gen|generator|disc?|discriminator)(?![a-z])|(?<![A-Za-z0-9])(?:[Ll]oss|err)?_?[DdGg](?![A-Za-z])"
)
"""In the name of a GAN's loss."""
VANISHED = 1e-3
"""A loss below this fraction of its first value within ``_SOON`` rows has vanished, if the norm has as well."""
_SOON, _BESIDES = 20, 30.0
_USUAL_SCALE = 2**15
"""Scalers begin at twice this scale, or far above it."""
_FIRST_SCALE = 2**20
"""No run goes on at such a loss scale: it is one that a scaler begins with."""
BLOWN = 1000.0
"""Multiple of a loss's first value at which a run that ends there has diverged."""
HEIGHT = 1e5
"""A usual norm of this size is none to train at, where the loss is an ordinary number."""


@dataclass(frozen=True)
class Sign:
    kind: str
    sentence: str
    advice: str = ""
    first: int | None = None
    """The first step that shows it."""
    before: int | None = None
    """Where to go back: to a checkpoint from before this step; None where that does not help."""


def is_supervised(metrics: Metrics) -> bool:
    """Return whether a run logs nothing about rollouts, rewards or a policy."""
    known = (*SCORES, *REFERENCE_KL, LENGTH, "actor/ppo_kl", "actor/pg_clipfrac")
    has_words = any(re.search(r"policy|actor/|reward|rollout", name.lower()) for name in metrics.own_names)
    return bool(metrics) and not has_words and not any(metrics.logged(name) for name in known)


def trainer_class(metrics: Metrics) -> str:
    """Return the name of TRL's trainer that logs such metrics."""
    if any("rewards/margins" in name or "rewards/chosen" in name for name in metrics.series):
        return "DPOTrainer"
    return "SFTTrainer" if is_supervised(metrics) else "GRPOTrainer"


def loss_of(metrics: Metrics) -> tuple[str, list[tuple[int, float]]]:
    """Return the loss's own name and values; empty where there is none, or where the run has a reward.

    A reward that few rows have is an evaluation's.
    """
    name = metrics.first(LOSSES)
    logged, num_rewards = metrics.logged(name), max(len(metrics.finite(score)) for score in SCORES)
    return ("", []) if num_rewards and 4 * num_rewards >= len(logged) else (metrics.own(name), logged)


def is_loss_judged(metrics: Metrics) -> bool:
    """Return whether the size of a run's loss shows its health."""
    return bool(loss_of(metrics)[1]) and not is_adversarial(metrics)


def is_adversarial(metrics: Metrics) -> bool:
    """Return whether a run's loss is that of a GAN's generator or discriminator."""
    return ADVERSARIAL.search(loss_of(metrics)[0]) is not None


def sound_loss(metrics: Metrics, first: int) -> str:
    """Say that the loss is finite from a step on, with its range; empty where it is not finite or not logged."""
    name = metrics.first(LOSSES)
    values = [value for step, value in metrics.logged(name) if step >= first]
    if not values or not all(map(math.isfinite, values)):
        return ""
    if len(values) > 2 and is_supervised(metrics) and min(values[1:]) > 3 * values[0] > 0:
        return ""  # it is finite, and the weights are no longer what they were
    sizes = [abs(value) for value in values]
    is_sure = name == "actor/pg_loss" or min(sizes) > 0 and max(sizes) <= 100 * min(sizes)
    if len(values) > 1 and not is_sure:  # a Trainer writes 0 for a NaN
        return ""
    steps = [step for step, _ in metrics.logged(name)]
    if steps[-1] == first and len(steps) > 1:  # what this step did shows in the next one
        return ""
    span = " to ".join(number(value, 3) for value in dict.fromkeys((min(values), max(values))))
    return f"{metrics.own(name)} is finite in {plural(len(values), 'row')} from step {first} on ({span})"


def lost_loss(run: LoggedRun, lost: Sequence[int]) -> str:
    """Explain how a trainer logs a NaN loss that is not in the log; empty where that is not known."""
    name, logged = loss_of(run.metrics)
    zeros = [step for step, value in logged if value == 0 and step in lost]
    if zeros:
        return f"{name} is 0 {_at(zeros)}: a Trainer writes 0 for a NaN."
    if not logged and run.format.startswith("Megatron"):
        return "The loss is not in these rows: Megatron leaves it out where it is NaN."
    return ""


def _at(steps: Sequence[int]) -> str:
    return f"at {'step' if len(steps) == 1 else 'steps'} {ranges(steps)}"


def begins(run: LoggedRun) -> str:
    """Return whether a log begins at the run's ``start`` or ``late``; empty where that is not known."""
    metrics = run.segments[0].metrics
    apart = interval(metrics)
    if len(metrics.steps) == 1 and metrics.finite("epoch")[:1] in ([0.0], [1.0]):
        return ""
    if run.unit != "row":
        return "late" if metrics.steps[0] > 2 * apart else "start"
    epochs = metrics.finite("epoch")
    if len(epochs) < 2:
        return ""
    each = (epochs[-1] - epochs[0]) / (len(epochs) - 1)
    return "late" if epochs[0] > 3 * each + 0.02 else "start"


def interval(metrics: Metrics) -> int:
    """Return the median distance between logged steps."""
    steps = metrics.steps[-1000:]
    return int(median_low(b - a for a, b in zip(steps, steps[1:], strict=False))) if len(steps) > 2 else 1


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
        _height(metrics),
    ]
    change = None if zeros else _lasting(metrics) or _jumped(metrics) or _blown_up(metrics)
    found += [_scale_fell(run), change, _overfitted(metrics)]
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
        yield Sign("unfinite", f"{own} is {what} {where}{was}.", advice, lost[0], before_it)


def onset(logged: Sequence[tuple[int, float]], first: int) -> int:
    """Return the first of the steps just before ``first`` at which a loss is well above all that it was earlier."""
    rows = [row for row in logged if row[0] < first][-_USUAL - _BEFORE :]
    usual = max((loss for _, loss in rows[:-_BEFORE]), default=math.inf)
    rows = rows[-_BEFORE:]
    while rows and rows[-1][1] > usual + abs(usual) / 10:
        first = rows.pop()[0]
    return first


_USUAL, _BEFORE = 40, 5
"""Values that say what a loss was, and values just before a step."""


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


def from_start(subject: str, begin: str) -> str:
    """Begin a sentence on what is not finite in a log's first row; ``begin`` says whether that is the run's."""
    if begin:
        return f"{subject} is not finite from the first row on, so"
    return "If the first row is the run's first step,"


EARLIER = (
    "It began before this log or at its first row: look at the earlier log, and for a checkpoint from before it began."
)
"""Advice on a fault that a log has from its first row on, where that is not the run's."""


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
            "A skipped step leaves the weights as they are, so the next is skipped as well: raise the trainer's limit "
            "on the norm above these norms, or go back to before the first."
        )
        return Sign("skipped", sentence, advice, first)
    if len(skips) < 3 and (run.metrics.norms or loss_of(run.metrics)[1]):
        return Sign("", sentence, "", first)
    return Sign("skipped", sentence, "Compare the trainer's limit on the norm with the norms of these steps.", first)


def _overflowed(run: LoggedRun, skips: Sequence[Skip], where: str, first: int | None, last: int | None) -> Sign:
    """Tell overflows of fp16 that are a fault from its scaler's search for a scale."""
    scales = [scale for skip in skips for scale in (skip.before, skip.scale) if scale is not None]
    count, steps = sum(not skip.is_end for skip in skips), run.metrics.steps
    is_end = count < len(skips)
    has_rows = bool(run.metrics.norms or loss_of(run.metrics)[1])
    begin = skips[0].before
    fell = f" from {number(begin)}" if begin is not None else ""
    fell = f"; the loss scale fell{fell} to {number(min(scales))}" if scales and min(scales) != begin else ""
    end = ", and can fall no further: the run ends there" if is_end else ""
    sentence = f"fp16 overflowed {plural(count, 'time')}{where}{fell}{end}. Each such step was skipped."
    if not count:
        sentence = "The loss scale fell to its minimum, and the run ended: every step had overflowed."
    # the scaler of a new run halves a scale that is far too large, once a step
    is_early = begins(run) == "start" or scales[:1] >= [_FIRST_SCALE]
    is_sound = scales[-1:] > [100] or scales[-1:] >= [1] and (last or 0) <= steps[0]
    is_search = is_early and count < steps[-1] and (first or 0) <= steps[0] and is_sound
    after = steps[-1] - (last or steps[0])
    is_past = has_rows and (is_search or after >= (3 if is_early and (first or 0) < 10 else 10) * count)
    is_over = not is_end and (count < 3 and min(scales, default=1) >= 1 or is_past)
    advice = "A few are normal while the scaler finds its scale."
    if not has_rows and not is_end and len(scales) > 1 and scales[0] >= _USUAL_SCALE and scales[-1] > 100:
        is_over |= count <= math.log2(scales[0] / scales[-1]) + 2
        advice = "A new run's scaler finds its scale like this: look again if overflows go on below 100."
    if counts := run.metrics.known(SKIPPED):
        number_of, skipped = counts[-1]
        is_over = not is_end and (number_of >= 10 * skipped or is_past)
        num_skipped = plural(int(skipped), "skipped step")
        sentence = f"fp16 overflowed: the trainer counts {num_skipped} of {number_of:,}{fell}{end}."
    if not is_over:
        advice = "Train in bf16 with the weights in fp32, where the device has it; else look for what overflows: "
        advice += "learning rate, or bad data."
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
    if (
        num_zeros < 2
        or not is_sudden
        or any(norm != 0 for step, norm in metrics.known(metrics.norm or "")[-num_zeros:])
    ):
        return None
    step, (last, was) = logged[-num_zeros][0], before[-1]
    sentence = f"{name} is exactly 0 from step {step} on, and was {number(was, 3)} at step {last}: "
    sentence += "a Trainer writes 0 for a NaN, or nothing is left to predict."
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
    return Sign("unfinite", sentence, "", zeros[0])


def _vanished(metrics: Metrics) -> Sign | None:
    name, _ = loss_of(metrics)
    known = metrics.known(name)[:_SOON]
    norms = [norm for _, norm in metrics.known(metrics.norm or "")][:_SOON]
    if len(known) < 2 or known[0][1] < 0.1 or min(value for _, value in known) < 0:
        return None
    at = next((at for at, (_, value) in enumerate(known) if value <= VANISHED * known[0][1]), None)
    is_gone = at is not None and max(value for _, value in known[at:]) <= VANISHED * known[0][1]
    if not is_gone or not norms or norms[-1] > VANISHED * norms[0]:
        return None
    sentence = (
        f"Loss and gradient vanish: {name} {number(known[0][1], 3)} at step {known[0][0]}, "
        f"{number(known[-1][1], 2)} at step {known[-1][0]}; norm {number(norms[0], 3)}, then {number(norms[-1], 2)}."
    )
    advice = "There is nothing to predict: look at the labels and the mask (targets that equal the input, all masked)."
    return Sign("vanish", sentence, advice, known[at][0] if at is not None else None)


def _norm_vanished(metrics: Metrics) -> Sign | None:
    """Find norms that end far below what they were, and fell far more than the loss."""
    name, losses = loss_of(metrics)
    norms, third = metrics.known(metrics.norm or ""), len(losses) // 3
    if len(norms) < 3 * NEAR or third < NEAR:
        return None
    usual = median(norm for _, norm in norms[: len(norms) // 3])
    step = next((step for step, norm in norms if norm <= VANISHED * usual), None)
    end = median(norm for _, norm in norms[-NEAR:])
    before, after = (median(loss for _, loss in part) for part in (losses[:third], losses[-third:]))
    if step is None or not 0 < end <= VANISHED * usual or before <= 0 or after / before < _BESIDES * end / usual:
        return None  # where a loss is fitted, its gradient vanishes with it
    sentence = (
        f"The gradient norm vanishes: {number(usual, 3)} in the median of its first third, below a thousandth of "
    )
    sentence += f"that from step {step} on, {number(end, 2)} at the end; {name} was {number(before, 3)}, and is "
    sentence += f"{number(after, 3)} (medians)."
    return Sign("vanish", sentence, "Nothing is learned any more: look at what saturates, and at frozen weights.", step)


def _height(metrics: Metrics) -> Sign | None:
    norms = metrics.norms
    name = metrics.first(LOSSES)
    losses = [abs(value) for value in metrics.finite(name)]
    if not norms or median_low(norms) < HEIGHT or not losses or median(losses) > 100:
        return None
    if median_low(norms) < HEIGHT * median(metrics.finite("loss scale") or [1.0]):
        return None  # it is logged before the division by the loss scale, as DeepSpeed's Megatron did
    sentence = (
        f"{metrics.own_norm} is {number(median_low(norms), 3)} in the median of {plural(len(norms), 'row')}, and "
        f"{metrics.own(name)} is {number(median(losses), 2)}: no run trains at such a norm."
    )
    advice = (
        "Look whether the norm is logged before the division by the loss scale or the number of tokens; else one "
        "layer's gradient is broken: log the norm of each layer."
    )
    return Sign("height", sentence, advice, metrics.steps[0])


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


def _lasting(metrics: Metrics) -> Sign | None:
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
        if at >= len(values) - 2 and way:
            change = f"from {number(was, 2)} around step {step} to {number(worst, 3)} at step {known[at][0]}"
        return Sign("fell", f"{own} {first.verb} {change}.", "", step, step + 1)
    before_it = known[rise.at - 1][0]
    was, now = median(values[rise.low.start : rise.at]), median(values[rise.at :])
    between = f"at step {step}" if step - before_it <= 1 else f"between steps {before_it} and {step}"
    until = "did not come back" if len(values) - rise.at >= NEAR else "was not back at the end of the log"
    sentence = f"{own} {first.verb} {between} and {until}: {number(was, 2)} before, {number(now, 2)} after (medians)"
    also = [f"{other.effect.title} from step {other.step}" for other in others]
    sentence += f"; {' and '.join(also)}, too" if also else ""
    top, highest = max(known[rise.at :], key=itemgetter(1))
    kind = "collapse" if first.effect is LOSS and highest > _PEAK * now > 0 else "fell"
    sentence += f"; it peaked at {number(highest, 3)} at step {top}" if kind == "collapse" else ""
    return Sign(kind, f"{sentence}.", "", step, before_it + 1)


def _overfitted(metrics: Metrics) -> Sign | None:
    """Find an evaluation that has got worse for a third of its values or more, while the loss of training fell."""
    name, losses = loss_of(metrics)
    own = evaluation_of(name, metrics.own_names) if name and not is_adversarial(metrics) else ""
    known = metrics.known(own)
    if len(known) < _EVALUATIONS:
        return None
    at = min(range(len(known)), key=lambda at: known[at][1])
    (step, best), end = known[at], median(value for _, value in known[-3:])
    usual = median(value for _, value in known[max(at - 1, 0) : at + 2])
    if 3 * at > 2 * len(known) or not end > _WORSE * usual > 0:
        return None
    then, now = ([loss for each, loss in losses if is_then(each)] for is_then in (step.__ge__, step.__lt__))
    if not then or not now or not median(now[-NEAR:]) < 0.95 * median(then[-NEAR:]):
        return None
    sentence = f"{own} was lowest at step {step}, {number(best, 3)}, and is {number(known[-1][1], 3)} at step "
    sentence += f"{known[-1][0]}, while {name} fell on: the run overfits."
    return Sign("overfit", sentence, f"Take the checkpoint of about step {step}.", step)


_EVALUATIONS, _WORSE = 5, 1.15
"""Least evaluations, and how many times the lowest one an evaluation is that has got worse."""


def _scale_fell(run: LoggedRun) -> Sign | None:
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


def _jumped(metrics: Metrics) -> Sign | None:
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


def _blown_up(metrics: Metrics) -> Sign | None:
    """Find a loss, of a part of the model or of all, that ends at over a thousand times its first value."""
    for name in filter(is_training_loss, metrics.own_names):
        known = metrics.known(name)
        times = known[-1][1] / known[0][1] if known and known[0][1] > 0 else 0.0
        if times > BLOWN and known[-1][1] > 1:
            step = next(step for step, value in known if value > 10 * known[0][1])
            before = max(earlier for earlier, _ in known if earlier < step) + 1
            sentence = (
                f"{name} rose from {number(known[0][1], 3)} at step {known[0][0]} to {number(known[-1][1], 3)} at step "
                f"{known[-1][0]}, the last."
            )
            return Sign("fell", sentence, "", step, before)
    return None
