# SPDX-License-Identifier: Apache-2.0
"""An event as a person wants to hear it: what happened, whether it hurt, what to do now.

Nothing here is a guess: what the record, its bundle or the run's metrics do not say is left out.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from ...evidence.numbers import number, percent
from ...evidence.record import Culprit, Event
from ..text import plural, times, visible
from . import advice
from .events import bundle_folder
from .metrics import MAX, MEAN, Metrics

COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
SPANS = {"token": "token", "segment": "span of tokens", "sequence": "response"}
ODD = {
    "token_mismatch": ("ratio_over_typical", "its ratio is "),
    "sequence_mismatch": ("ratio_over_typical", "the ratio is "),
    "large_jacobian": ("jacobian_over_typical", "its log-prob's gradient is "),
    "extreme_advantage": ("advantage_over_typical", ""),
    "low_probability": ("jacobian_over_typical", "its log-prob's gradient is "),
    "kl_term": ("kl_over_typical", "its force is "),
    "is_weight": ("is_weight_over_typical", ""),
}
"""The number that makes each cause a cause, and what it is a number of where the cause's title does not say."""
TRIGGERS = {
    "fixed": "fixed rule",
    "adaptive": "learned from the run",
    "forced": "a rehearsal",
    "non_finite": "the norm is not finite",
}
REWARDS = ("critic/score/mean", "critic/rewards/mean")
NEAR = 5
"""Steps before and after the event that are compared."""
LEAST = 3
"""Steps that are too few to say what was usual."""


@dataclass(frozen=True)
class Story:
    """What the first screen says of an event."""

    headline: str
    lede: str
    before: str
    token: str
    """The largest culprit's own text; the text before and after it is beside it."""
    after: str
    figures: list[tuple[str, str, str]]
    """Three of value, what it is, and a remark."""
    consequence: list[str]
    """What the step did, and how the run went on; sentences."""
    action: tuple[str, str] | None
    """What to do, and the config line that does it."""


def tell(event: Event, clip: float | None, metrics: Metrics) -> Story:
    """Put an event's story together.

    Args:
        event: the event.
        clip: the norm that gradients were clipped to; None where that is not known.
        metrics: the run's; may be empty.
    """
    first = leader(event)
    return Story(
        headline=headline(event),
        lede=_lede(event, first),
        before=visible((first and first.text_before) or "")[-200:],
        token=visible(first.text)[:200] if first else "",
        after=visible((first and first.text_after) or "")[:160],
        figures=_figures(event),
        consequence=[*_step(event, clip), *_afterwards(event, metrics)],
        action=_action(event, first),
    )


def leader(event: Event) -> Culprit | None:
    """The culprit that carries most of the spike."""
    return max(event.culprits, key=weight, default=None)


def weight(culprit: Culprit) -> float:
    """How much a culprit carries: its share, else its norm; what is not finite carries most."""
    for value in (culprit.share, culprit.grad_norm):
        if value is not None:
            return abs(value) if math.isfinite(value) else math.inf
    return 0.0


def headline(event: Event) -> str:
    """What happened, in one sentence without a number beyond the step's.

    >>> headline(Event())
    'Nothing was found that made the spike at step 0'
    """
    step = event.step.global_step
    norm = event.trigger.grad_norm
    is_finite = norm is None or math.isfinite(norm)
    what = f"the step-{step} spike" if is_finite else f"the gradient of step {step} not finite"
    if event.trigger.kind == "forced":
        what = f"most of step {step}'s gradient (a rehearsal)"
    if not event.culprits:
        return f"Nothing was found that made the spike at step {step}"
    who = culprits(event)
    if event.certificate.verdict == "not_explained":
        return f"{who} made part of {what}; something else spikes, too"
    if event.certificate.verdict == "undecided" and is_finite:
        return f"{who} may have made {what}"
    return f"{who} made {what}"


def culprits(event: Event) -> str:
    """``One token``, ``Three responses``, ``14 culprits``."""
    count = len(event.culprits)
    spans = {culprit.span for culprit in event.culprits}
    noun = SPANS.get(spans.pop(), "culprit") if len(spans) == 1 else "culprit"
    if noun.startswith("span") and count > 1:
        noun = "spans of token"
    head = COUNTS[count] if count < len(COUNTS) else f"{count:,}"
    return f"{head} {plural(count, noun).partition(' ')[2]}"


def _lede(event: Event, first: Culprit | None) -> str:
    if first is None:
        return f"The search stopped because {event.search.stop_reason}." if event.search.stop_reason else ""
    shares = [culprit.share for culprit in event.culprits]
    subject = "It" if len(shares) == 1 else "Together they"
    carried = ""
    if all(share is not None and math.isfinite(share) for share in shares):
        carried = f"{subject} {'carries' if len(shares) == 1 else 'carry'} {percent(sum(shares))} of the gradient. "
    odd = odd_number(first)
    return f"{carried}{advice.of(first.cause.label).title}{f': {ODD[first.cause.label][1]}{odd}' if odd else ''}."


def odd_number(culprit: Culprit) -> str:
    """The number that stands out, such as ``476,096 times typical``; empty where none is known."""
    value = culprit.cause.numbers.get(ODD.get(culprit.cause.label, ("",))[0])
    return f"{number(value, 3)} times typical" if value is not None and math.isfinite(value) else ""


def _figures(event: Event) -> list[tuple[str, str, str]]:
    found, trigger = event.certificate, event.trigger
    norm = trigger.grad_norm if trigger.grad_norm is not None else found.norm_before
    threshold = trigger.threshold if trigger.threshold is not None else found.threshold
    excess = times(norm, threshold)
    over = f"{number(excess, 3)} times the threshold" if excess is not None else "of the whole step"
    bound = f"measured, ± {number(found.error_bound, 2)}" if found.error_bound is not None else found.method
    return [
        (number(norm, 3), "gradient norm", over),
        (number(found.norm_after, 3), _without(event), bound if found.norm_after is not None else "not measured"),
        (number(threshold, 3), "threshold", TRIGGERS.get(trigger.kind, trigger.kind)),
    ]


def _without(event: Event) -> str:
    if not event.culprits:
        return "without culprits"
    return "without it" if len(event.culprits) == 1 else "without them"


def _step(event: Event, clip: float | None) -> list[str]:
    """What the optimizer did with the step."""
    norm, after, taken = event.trigger.grad_norm, event.certificate.norm_after, event.action.taken
    if taken == "skip":
        return ["The optimizer took no step: this mini-batch was skipped."]
    if taken == "abort":
        return ["The run was stopped before the step was taken."]
    if taken == "mask":
        size = f", of norm {number(after, 3)}" if after is not None and math.isfinite(after) else ""
        return [f"The optimizer took the step {_without(event)}{size}."]
    if norm is None:
        return []
    if not math.isfinite(norm):
        return ["verl skipped the step, because its norm was not finite."]
    if clip is None:
        return ["The optimizer took the step with the spike in it."]
    if norm <= clip:
        return [f"The optimizer took the step as it was: its norm is within the clip limit of {number(clip, 3)}."]
    said = f"Clipping to {number(clip, 3)} scaled the whole step to 1/{number(norm / clip, 3)}"
    if after is None or not math.isfinite(after) or event.certificate.verdict != "explained":
        return [f"{said}, and the optimizer took it."]
    kept = (clip / norm) / min(1.0, clip / after) if after > 0 else None
    left = f" That left the healthy part {percent(kept, 2)} of its usual size." if kept is not None else ""
    return [f"{said}, and the optimizer took it.{left}"]


def _afterwards(event: Event, metrics: Metrics) -> list[str]:
    """Whether the run went on as before, as far as its metrics say."""
    step = event.step.global_step
    norm = MAX if metrics.finite(MAX) else MEAN
    before, after = _around(metrics, norm, step)
    said = []
    if after and len(before) >= LEAST:
        usual = statistics.median(before)
        said.append(f"At the next step the norm was {number(after[0], 3)}; before, {number(usual, 3)} was usual.")
    reward = next((name for name in REWARDS if metrics.finite(name)), "")
    before, after = _around(metrics, reward, step)
    if len(before) >= LEAST and len(after) >= LEAST:
        means = [sum(part) / len(part) for part in (before, after)]
        said.append(
            f"Mean reward: {number(means[0], 3)} over the {len(before)} steps before, "
            f"{number(means[1], 3)} over the {len(after)} after."
        )
    return said


def _around(metrics: Metrics, name: str, step: int) -> tuple[list[float], list[float]]:
    """A metric's finite values at the steps just before and just after one."""
    known = [
        (s, v) for s, v in zip(metrics.steps, metrics.get(name), strict=True) if v is not None and math.isfinite(v)
    ]
    before = [value for at, value in known if step - NEAR <= at < step]
    after = [value for at, value in known if step < at <= step + NEAR]
    return before, after


def _action(event: Event, first: Culprit | None) -> tuple[str, str] | None:
    """The first advice for the largest culprit's cause that the run does not follow already."""
    mode = f"action.mode={event.action.requested}"
    for what, line in advice.of(first.cause.label if first else "unknown").advice:
        if not line.endswith(mode):
            return what, line
    return None


def clip_of(root: Path, event: Event) -> float | None:
    """The ``actor.grad_clip`` that the event's bundle names; None without one, or where nothing is clipped."""
    folder = bundle_folder(root, event)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8", errors="replace")) if folder else {}
        clip = float(meta["actor"]["grad_clip"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return clip if 0 < clip < math.inf else None
