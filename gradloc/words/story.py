# SPDX-License-Identifier: Apache-2.0
"""An event as a person wants to hear it: what happened, which numbers say so, what the optimizer was given.

Nothing here is a guess: what the record does not say is left out. Pure, standard library only.
"""

import math
import re
from dataclasses import dataclass

from ..record import Culprit, Event, StepCause
from .leader import leader
from .meanings import again, group, meaning_of, of_engine
from .numbers import bounded, number, percent
from .shares import carried, told_share
from .text import one_line, plural, times, visible

_COUNTS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")
_SPANS = {"token": "token", "segment": "span of tokens", "sequence": "response"}
ODD = {
    "token_mismatch": ("ratio_over_typical", "its ratio is "),
    "sequence_mismatch": ("ratio_over_typical", "the ratio is "),
    "large_jacobian": ("jacobian_over_typical", "its log-prob's gradient is "),
    "extreme_advantage": ("advantage_over_typical", ""),
    "low_probability": ("jacobian_over_typical", "its log-prob's gradient is "),
    "kl_term": ("kl_over_typical", "its force is "),
    "is_weight": ("is_weight_over_typical", ""),
    "value_outlier": ("error_over_typical", "the value is off by "),
}
"""The number that makes each cause a cause, and what it is a number of where the cause's title does not say."""
_TRIGGERS = {
    "fixed": "fixed rule",
    "adaptive": "learned from the run",
    "forced": "a rehearsal",
    "non_finite": "a norm that is not finite spikes by itself",
}

CERTIFICATES = {
    "explained": "explained: without the culprits the step is healthy",
    "not_explained": "not explained: without the culprits the step still spikes",
    "undecided": "undecided",
}
ACTIONS = {
    "observe": "observe: the step was taken unchanged",
    "mask": "mask: the optimizer took the step without the culprits",
    "skip": "skip: the optimizer took no step",
    "abort": "abort: the run was stopped",
}


@dataclass(frozen=True)
class Beside:
    """What the first screen says of a cause that is no token's."""

    headline: str
    """With {spike}, and {step} its number."""
    number: str = ""
    """The one of the cause's numbers that says most."""
    what: str = ""
    """What it is, as a figure's caption; and a remark on it."""
    remark: str = "measured"
    unit: str = ""
    named: str = ""
    """What its names are."""


BESIDE = {
    "non_finite_weights": Beside(
        "Weights that are not finite broke step {step}; no token did",
        number="parameters",
        what="parameters not finite",
        remark="read before any forward",
        named="Not finite:",
    ),
    "replicas_differ": Beside(
        "Replicas have parted; no token made {spike}",
        number="parameters",
        what="parameters differ",
        remark="between replicas of the weights",
        named="Not the same on all replicas:",
    ),
    "non_finite_backward": Beside(
        "The backward through the model made the gradient of step {step} not finite; no single token does"
    ),
    "non_finite_padding": Beside("Padding that is not finite broke step {step}; no token did", named="Not finite in:"),
    "batch_scale": Beside(
        "The whole batch made {spike}: all of it is scaled, no token stands out",
        number="coefficient_over_typical",
        what="the typical token's weight",
        remark="over the run's usual",
        unit="×",
    ),
    "not_tokens": Beside(
        "{Spike} did not come from the tokens",
        number="tokens_norm",
        what="the tokens' own part",
        named="Most of the rest is in:",
    ),
    "transient": Beside("{Spike} did not come back when it was run again", number="rerun_norm", what="when run again"),
    "entropy_term": Beside(
        "The entropy term leads {spike}; no single token does",
        number="entropy_term_over_policy",
        what="the term over the policy's",
        remark="of the loss's coefficients",
        unit="×",
    ),
    "kl_term": Beside(
        "The KL term leads {spike}; no single token does",
        number="kl_term_over_policy",
        what="the term over the policy's",
        remark="of the loss's coefficients",
        unit="×",
    ),
}
"""By label."""
_NAMES = 4
"""Parameters or tensors named on the first screen."""
_USUAL = 3.0
"""Under so many times the run's own, a batch's number is as it was."""
_WHOLE = 1.05
"""Of the gradient, with room for rounding."""
_LINES = 4
"""Of the text before the culprit, its own line included: a chat's prompt has many short ones."""


@dataclass(frozen=True)
class Story:
    """What the first screen says of an event."""

    headline: str
    lede: str
    before: str
    token: str
    """The largest culprit's own text; the text before and after it is beside it."""
    after: str
    named: str
    names: tuple[str, ...]
    """Where no token made it: the parameters, or the batch's tensors, that did, and what they are."""
    figures: list[tuple[str, str, str]]
    """Three of value, what it is, and a remark."""
    given: list[str]
    """What the step did; sentences."""


def tell(event: Event, clip: float | None = None) -> Story:
    """An event's story; ``clip`` is the norm that gradients were clipped to, where the event does not say it."""
    first = leader(event.culprits)
    cause = beside(event)
    more = len(cause.names) - _NAMES if cause else 0
    names = tuple(one_line(name, 80) for name in cause.names[:_NAMES]) if cause else ()
    return Story(
        headline=headline(event),
        lede=lede(event),
        before="\n".join(visible((first and first.text_before) or "")[-200:].split("\n")[-_LINES:]),
        token=visible(first.text)[:200] if first else "",
        after=visible((first and first.text_after) or "")[:160],
        named=BESIDE[cause.label].named if cause else "",
        names=(*names, f"and {more} more") if more > 0 else names,
        figures=figures(event),
        given=_step(event, clip),
    )


def beside(event: Event) -> StepCause | None:
    """What made the spike, or a part of it, that is no token; None where the tokens did, or nobody knows."""
    cause = event.cause
    return cause if cause is not None and cause.label in BESIDE and cause.reason else None


def cause_of(event: Event) -> str:
    """The step's cause: what is no token's first, else the largest culprit's; empty where there is none."""
    other, first = beside(event), leader(event.culprits)
    return other.label if other else first.cause.label if first else ""


def headline(event: Event) -> str:
    """What happened, in one sentence without a number beyond the step's.

    >>> headline(Event())
    'Nothing was found that made the spike at step 0'
    """
    step = event.step.global_step
    norm = event.trigger.grad_norm
    is_finite = norm is None or math.isfinite(norm)
    what = f"the step-{step} spike" if is_finite else f"the gradient of step {step} not finite"
    if event.model == "critic":
        what = what.replace("spike", "spike of the critic").replace("the gradient", "the critic's gradient")
    if event.trigger.kind == "forced":
        what = f"most of step {step}'s gradient (a rehearsal)"
    other = beside(event)
    if not event.culprits and other:
        return BESIDE[other.label].headline.format(step=step, spike=what, Spike=what[0].upper() + what[1:])
    if not event.culprits:
        return f"Nothing was found that made the spike at step {step}"
    who = culprits(event)
    if other:
        return f"{who} made part of {what}; the rest did not come from the tokens"
    if event.certificate.verdict == "not_explained":
        rest = "more culprits are left" if event.search.num_more else "something else spikes, too"
        return f"{who} made part of {what}; {rest}"
    if event.certificate.verdict == "undecided" and is_finite:
        return f"{who} may have made {what}"
    return f"{who} made {what}"


def culprits(event: Event) -> str:
    """``One token``, ``Three responses``, ``14 culprits``."""
    count = len(event.culprits)
    spans = {culprit.span for culprit in event.culprits}
    noun = _SPANS.get(spans.pop(), "culprit") if len(spans) == 1 else "culprit"
    if noun.startswith("span") and count > 1:
        noun = "spans of token"
    head = _COUNTS[count] if count < len(_COUNTS) else f"{count:,}"
    return f"{head} {plural(count, noun).partition(' ')[2]}"


def lede(event: Event) -> str:
    """What the culprits carry and why, or what else made the spike; sentences."""
    first = leader(event.culprits)
    other = beside(event)
    said = _beside(other) if other else ""
    if first is None:
        stopped = f"The search stopped because {event.search.stop_reason}." if event.search.stop_reason else ""
        return (said or stopped) + first_place(event)
    share = carried(event, event.culprits)
    subject = "It carries" if len(event.culprits) == 1 else "Together they carry"
    rest = "" if _is_part(event) else "; the other tokens pull the other way"
    part = f"{subject} {share} of the gradient{rest}." if share is not None else ""
    odd = odd_number(first)
    why = f"{meaning_of(first.cause.label).title}{f': {ODD[first.cause.label][1]}{odd}' if odd else of_engine(first)}."
    more = f"At least {event.search.num_more} more are left." if event.search.num_more else ""
    return " ".join(
        sentence for sentence in (part, why + again(first) + first_place(event), group(event), more, said) if sentence
    )


def first_place(event: Event) -> str:
    """In which module NaN or infinity first appears; with a blank before it."""
    first = event.first_not_finite
    if first is None:
        return ""
    what = "the output" if first.way == "forward" else "the gradient of the output"
    before = [f"{one_line(name, 60)} {number(size, 3)}" for name, size in reversed(first.before.items())]
    largest = f"; the largest values right before it: {', '.join(before)}" if before else ""
    return f" It first appears in {what} of {one_line(first.module, 60)}{largest}."


def _is_part(event: Event) -> bool:
    """Whether what the culprits carry is no more than the gradient: others may pull the other way."""
    return math.fsum(told_share(event, culprit) or 0.0 for culprit in event.culprits) < _WHOLE


def _beside(cause: StepCause) -> str:
    """A cause that is no token's in words, and where to look."""
    if cause.label == "transient":  # the reason is the headline already
        return "Hardware or a race made it, not the data."
    said = re.sub(r"[\d.]+e[+]\d+", lambda found: number(float(found[0]), 3), cause.reason)
    said = f"{said[0].upper()}{said[1:]}."
    if cause.places:
        row, position = cause.places[0]
        where = "" if row is None else f"row {row} of the batch, "
        more = f", and {len(cause.places) - 1} more" if len(cause.places) > 1 else ""
        said += f" The first: {where}response position {position}{more}."
    advantage = cause.numbers.get("advantage_over_run")
    if cause.label == "batch_scale" and advantage is not None:
        who = (
            "the loss or the ratios scale it" if advantage < _USUAL else "it is the rewards, or how they are normalized"
        )
        said += f" Its advantages are {number(advantage, 3)} times the run's usual: {who}."
    return said


def odd_number(culprit: Culprit) -> str:
    """The number that stands out, such as ``380,119 times typical``; empty where none is known."""
    value = culprit.cause.numbers.get(ODD.get(culprit.cause.label, ("",))[0])
    return f"{number(value, 3)} times typical" if value is not None and math.isfinite(value) else ""


def figures(event: Event) -> list[tuple[str, str, str]]:
    """Three of value, what it is, and a remark: the norm, what it would have been, the threshold."""
    found, trigger = event.certificate, event.trigger
    norm = trigger.grad_norm if trigger.grad_norm is not None else found.norm_before
    threshold = trigger.threshold if trigger.threshold is not None else found.threshold
    excess = times(norm, threshold)
    over = f"{number(excess, 3)} times the threshold" if excess is not None else "of the whole step"
    return [
        (number(norm, 3), "gradient norm", over),
        _second(event),
        (number(threshold, 3), "threshold", _TRIGGERS.get(trigger.kind, trigger.kind)),
    ]


def _second(event: Event) -> tuple[str, str, str]:
    """What the step would have been without what made it, or the number that tells what did."""
    found, other = event.certificate, beside(event)
    if other and not event.culprits:
        about = BESIDE[other.label]
        value = other.numbers.get(about.number)
        if value is not None:
            return number(value, 3) + about.unit, about.what, about.remark
    if not event.culprits and not other:
        return "0", "culprits found", event.search.status.replace("_", " ")
    norm, margin = bounded(found.norm_after, found.error_bound, 3)
    how = f"measured{margin}" if found.error_bound is not None else found.method
    without = "without the padding" if other and other.label == "non_finite_padding" else f"without {it(event)}"
    return norm, without, how if found.norm_after is not None else "not measured"


def it(event: Event) -> str:
    """``it``, ``them``; ``that`` where no token made it."""
    return "that" if not event.culprits else "it" if len(event.culprits) == 1 else "them"


def _step(event: Event, clip: float | None) -> list[str]:
    """What the optimizer did with the step, and what that means for the next ones."""
    said, other, known = [given(event, clip)], beside(event), event.consequence
    if other and other.label == "non_finite_weights":
        said.append("Every further step will be like it until weights that are finite are loaded.")
    if known and known.last_checkpoint:
        said.append(f"The newest checkpoint before it: {one_line(known.last_checkpoint, 120, keep='end')}.")
    return [sentence for sentence in said if sentence]


def given(event: Event, clip: float | None = None) -> str:
    """What the optimizer was given, in sentences; ``clip`` as :func:`tell` takes it."""
    if event.consequence is not None:
        clip = event.consequence.grad_clip
    norm, after, taken = event.trigger.grad_norm, event.certificate.norm_after, event.action.taken
    if taken == "skip":
        asked = event.action.requested
        why = f" {asked.capitalize()} was asked for, but {one_line(event.action.reason)}." if asked != taken else ""
        return f"The optimizer took no step: this mini-batch was skipped.{why}"
    if taken == "abort":
        return "The run was stopped before the step was taken."
    is_known = after is not None and math.isfinite(after)
    if taken == "mask":
        size = f", of norm {bounded(after, event.certificate.error_bound, 3)[0]}" if is_known else ""
        clipped = f", clipped to {number(clip, 3)}" if after is not None and is_known and clip and after > clip else ""
        return f"The optimizer took the step without {it(event)}{size}{clipped}."
    if norm is None:
        return ""
    if not math.isfinite(norm):
        if event.consequence is not None and event.consequence.is_taken:
            return "The optimizer took the step: the weights that it moved are not finite any more."
        return "The trainer skipped the step, because its norm was not finite."
    if clip is None:
        return "The optimizer took the step with the spike in it."
    if norm <= clip:
        return f"The optimizer took the step as it was: its norm is within the clip limit of {number(clip, 3)}."
    share = carried(event, event.culprits) if _is_part(event) else None
    whose = f"that {_SPANS.get(event.culprits[0].span, 'culprit')}'s" if len(event.culprits) == 1 else "theirs"
    took = f"{share} of what the optimizer took was {whose}" if share is not None else "the optimizer took it"
    said = f"Clipping to {number(clip, 3)} scaled the whole step to 1/{number(norm / clip, 3)}, and {took}."
    if not is_known or not after or event.certificate.verdict != "explained":
        return said
    healthy = event.consequence.healthy_norm if event.consequence else None
    kept = (after * clip / norm if healthy is None else healthy) / min(clip, after)
    return f"{said} That left the healthy part {percent(kept, 2)} of its usual size."
