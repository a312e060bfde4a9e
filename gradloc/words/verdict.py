# SPDX-License-Identifier: Apache-2.0
"""What an event says in three sentences, for somebody who has never seen one. Pure, standard library only.

The first sentence says what spiked, which tokens did it and why, or what else did; the second what the step would have
been without them; the third what the optimizer was given.
"""

import math
from collections.abc import Sequence

from ..record import Culprit, Event
from .leader import by_size
from .numbers import bounded, number, percent, with_error

__all__ = ["carried", "not_finite", "quote", "shares_sentence", "told_share", "verdict_sentences"]

_CAUSES = {
    "token_mismatch": "the policy has moved away from the old one at this token: their ratio is {ratio_over_typical}",
    "sequence_mismatch": "the policy has moved away from the old one over the whole sequence: the ratio here is "
    "{ratio_over_typical}",
    "layer_heterogeneity": "some layers explode on it while the others stay calm",
    "large_jacobian": "the model is extremely sensitive there: the gradient of the log-prob alone is "
    "{jacobian_over_typical} times typical",
    "extreme_advantage": "the advantage there is {advantage_over_typical} times typical",
    "low_probability": "the model gave it a very low probability, which makes the gradient of its log-prob "
    "{jacobian_over_typical} times typical",
    "kl_term": "the KL penalty pulls it towards the reference policy with {kl_over_typical} times the usual force",
    "entropy_term": "the entropy term's coefficient there is {entropy_over_log_prob} times the policy term's",
    "spurious_token": "it was an unlikely token where the model was sure of another, in a response that was rewarded",
    "value_outlier": "the value is off there by {error_over_typical} times what is typical: the critic says {value}, "
    "the return is {value_target}",
    "is_weight": "the weight of the rollout correction there is {is_weight_over_typical} times typical",
    "non_finite": "its loss has no finite gradient",
    "non_finite_forward": "the forward itself is not finite there, although all weights are",
}


_MOST_NAMES = 3


def verdict_sentences(event: Event) -> str:
    """What happened, in up to three sentences of printable characters; what a token holds beyond those is escaped."""
    return " ".join(sentence for sentence in (_what(event), _without(event), _given(event)) if sentence)


def quote(culprit: Culprit) -> str:
    """The culprit's text, or its token numbers where none is kept (evidence.text=off), quoted and cut short."""
    text = culprit.text or "<?>"
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:40])
    return f'"{shown}"'


def told_share(event: Event, culprit: Culprit) -> float | None:
    """The culprit's share; None where it is no backward's own, but of tokens' shares that do not add up."""
    is_trusted = culprit.is_exact or event.shares is None or event.shares.is_trusted
    return culprit.share if is_trusted else None


def carried(event: Event, culprits: Sequence[Culprit], share: float | None = None) -> str | None:
    """What these culprits carry of the gradient together, and its standard error: ``75% +- 0.3%``.

    Args:
        event: theirs.
        culprits: some, or all of them.
        share: the sum of their shares, where it is known already.

    Returns:
        None where the share of one is not known, or cannot be trusted.
    """
    shares = [told_share(event, culprit) for culprit in culprits]
    known = [found for found in shares if found is not None and math.isfinite(found)]
    if not known or len(known) < len(shares):
        return None
    error = math.hypot(*(culprit.share_error or 0.0 for culprit in culprits))
    return with_error(sum(known) if share is None else share, error, 3, percent)


def shares_sentence(event: Event) -> str:
    """What the measured shares add up to, and what that means; empty where they were not measured."""
    if event.shares is None:
        return ""
    total = with_error(event.shares.closure, event.shares.closure_error)
    if event.shares.is_trusted:
        return f"The measured shares add up to {total}."
    told = "Norms are used; a share that is told all the same was measured by a backward of its own"
    return f"The tokens' shares do not add up: their sum is {total}, not 1. {told}."


# ---- the first sentence


def _what(event: Event) -> str:
    trigger, culprits = event.trigger, event.culprits
    norm, threshold = trigger.grad_norm, trigger.threshold
    whose = "critic's " if event.model == "critic" else ""
    start = f"At step {event.step.global_step} the {whose}gradient "
    if norm is None or not math.isfinite(norm):
        start += "was not finite"
    elif trigger.kind == "forced":
        start += f"norm was {_number(norm)} (a rehearsal: this step was asked for)"
    elif threshold:
        start += f"norm was {_number(norm)}, {_number(norm / threshold)} times the threshold of {_number(threshold)}"
    else:
        start += f"norm was {_number(norm)}"
    beside = _beside(event)
    if not culprits and beside:
        return f"{start}, and no token made it: {beside}."
    if not culprits:
        return f"{start}, and no token was found that carries it."
    return f"{start}: {_who(event)}, {_why(culprits)}{f'; beside them, {beside}' if beside else ''}."


def _beside(event: Event) -> str:
    """What made the spike, or a part of it, that is no token."""
    cause = event.cause
    if cause is None or not cause.reason:
        return ""
    names = cause.names[:_MOST_NAMES]
    more = f" and {len(cause.names) - len(names)} more" if len(cause.names) > len(names) else ""
    return cause.reason + (f" ({', '.join(names)}{more})" if names else "")


def _who(event: Event) -> str:
    culprits, num_more = event.culprits, event.search.num_more
    first = by_size(culprits)[0]
    share = carried(event, culprits)
    carry = "carries" if len(culprits) == len(first.positions) == 1 else "carry"
    did = f"{carry} {share} of it" if share is not None else "made it"
    if len(culprits) == 1:
        return f"{_name(first)} {did}"
    more = f" and at least {num_more} more are left" if num_more else ""
    return f"{len(culprits)} culprits {did}{more}, the largest {_name(first)}"


def _name(culprit: Culprit) -> str:
    positions, sequence = culprit.positions, _sequence(culprit) + _turn(culprit)
    if len(positions) == 1:
        return f"the token {quote(culprit)} at position {positions[0]} of the response {sequence}"
    return f"the {len(positions)} tokens from position {positions[0]} of the response {sequence}"


def _turn(culprit: Culprit) -> str:
    turn = culprit.turn
    if turn is None:
        return ""
    after = f" after the tool's answer of {turn.num_before} tokens" if turn.num_before else ""
    return f", in turn {turn.number} of {turn.num_turns}{after},"


def _sequence(culprit: Culprit) -> str:
    if culprit.sequence_id is None:
        return f"in row {culprit.micro_batch_row} of micro-batch {culprit.micro_batch}, rank {culprit.rank}"
    uid, _, index = culprit.sequence_id.rpartition(":")
    return f"{uid if len(uid) <= 16 else uid[:8]}:{index}"  # verl's uids are 36 characters; 8 tell them apart


def _why(culprits: Sequence[Culprit]) -> str:
    cause = by_size(culprits)[0].cause
    form = _CAUSES.get(cause.label)
    if form is None:
        return "for no single reason: every factor is within three times what is typical"
    known = {
        name: _number(value) for name, value in cause.numbers.items() if value is not None and math.isfinite(value)
    }
    return "because " + form.format_map(_Unknown(known))


class _Unknown(dict):
    def __missing__(self, key: str) -> str:
        return "many"


# ---- the second sentence


def _without(event: Event) -> str:
    certificate, count = event.certificate, len(event.culprits)
    if not count and _beside(event):
        left = certificate.norm_after
        if certificate.method == "none" or left is None or not math.isfinite(left):
            return ""
        return f"Without that the norm is {bounded(left, certificate.error_bound, 3)[0]}."
    if not count:
        return f"The search stopped because {event.search.stop_reason}."
    them = _them(event)
    after, threshold = certificate.norm_after, certificate.threshold
    if after is None or not math.isfinite(after):
        return f"What the step would have been without {them} is not known: {certificate.reason}."
    start = f"Without {them} the norm is {''.join(bounded(after, certificate.error_bound, 3))}"
    limit = f" of {_number(threshold)}" if threshold is not None else ""
    if certificate.verdict == "explained":
        under = "which is finite" if threshold is None else f"under the threshold{limit}"
        return f"{start}, {under}: the spike is explained."
    if certificate.verdict == "not_explained":
        return f"{start}, still over the threshold{limit}: {_else(event)}."
    return f"{start}, and whether that explains the spike is undecided: {certificate.reason}."


def _else(event: Event) -> str:
    """What the rest is, where that still spikes."""
    search = event.search
    if search.status != "max_culprits":
        return "something else spikes, too"
    if not search.num_more:
        return "as many culprits are named as search.max_culprits allows"
    carry = f" of about {_number(search.more_norm)}" if search.more_norm else ""
    return f"search.max_culprits ended the search, and at least {search.num_more} culprits{carry} are left"


# ---- the third sentence


def _given(event: Event) -> str:
    consequence, taken = event.consequence, event.action.taken
    if consequence is None:
        return ""
    if taken in ("skip", "abort"):
        return "No step was taken."
    clip, scale = consequence.grad_clip, consequence.clip_scale
    if taken == "observe" and not math.isfinite(
        math.nan if event.trigger.grad_norm is None else event.trigger.grad_norm
    ):
        return not_finite(event)
    if clip is None or scale is None:
        return ""
    clipped = f"clipped to {_number(clip)} (times {_number(scale)})" if scale < 1 else "as it was"
    if taken == "mask":
        return f"The step was taken without {_them(event)}, {clipped}."
    healthy = consequence.healthy_norm
    left = f", and left {_number(healthy)} to all other tokens" if healthy is not None and scale < 1 else ""
    known = consequence.culprit_share
    share = carried(event, event.culprits, known) if known is not None else None
    whose = f": {share} of it was {_theirs(event)}{left}" if share is not None else ""
    return f"The optimizer was given the gradient {clipped}{whose}."


def not_finite(event: Event) -> str:
    """What became of a step whose norm is not finite, where nothing was done about it."""
    if event.consequence is not None and event.consequence.is_taken:
        return "The optimizer took this step: the weights that it moved are not finite any more."
    return "The trainer takes no step that is not finite."


def _them(event: Event) -> str:
    return "that token" if len(event.culprits) == 1 and len(event.culprits[0].positions) == 1 else "them"


def _theirs(event: Event) -> str:
    return "that token's" if _them(event) == "that token" else "theirs"


def _number(value: float) -> str:
    return number(value, 3)
