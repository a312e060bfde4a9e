# SPDX-License-Identifier: Apache-2.0
"""An event in a few sentences, for somebody who has never seen one. Pure, standard library only.

The first is the headline, which console, page and trackers share; then where the culprits are and why, what the norm
was and would have been, and what the optimizer was given.
"""

import math

from ..record import Culprit, Event
from .leader import leader
from .numbers import bounded, number
from .story import beside, given, headline, it, lede
from .text import times


def verdict_sentences(event: Event) -> str:
    """What happened, in sentences of printable characters; what a token holds beyond those is escaped."""
    sentences = [f"{headline(event)}.", _where(event), lede(event), _norms(event), given(event)]
    return " ".join(_printable(sentence) for sentence in sentences if sentence)


def quote(culprit: Culprit) -> str:
    """The culprit's text, or its token numbers where none is kept (evidence.text=off), quoted and cut short."""
    return f'"{_printable((culprit.text or "<?>")[:40])}"'


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _where(event: Event) -> str:
    first = leader(event.culprits)
    if first is None:
        return ""
    positions = first.positions
    what = f"the token {quote(first)} at position {positions[0]}"
    if len(positions) > 1:
        what = f"{len(positions)} tokens from position {positions[0]}"
    start = "It is" if len(event.culprits) == 1 else "The largest is"
    return f"{start} {what} of the response {_sequence(first)}{_turn(first)}."


def _turn(culprit: Culprit) -> str:
    turn = culprit.turn
    if turn is None:
        return ""
    after = f" after the tool's answer of {turn.num_before} tokens" if turn.num_before else ""
    return f", in turn {turn.number} of {turn.num_turns}{after}"


def _sequence(culprit: Culprit) -> str:
    if culprit.sequence_id is None:
        return f"in row {culprit.micro_batch_row} of micro-batch {culprit.micro_batch}, rank {culprit.rank}"
    uid, _, index = culprit.sequence_id.rpartition(":")
    return f"{uid if len(uid) <= 16 else uid[:8]}:{index}"  # verl's uids are 36 characters; 8 tell them apart


def _norms(event: Event) -> str:
    """The norm with and without what made it, and what that proves."""
    norm, threshold, found = event.trigger.grad_norm, event.trigger.threshold, event.certificate
    was = "The norm was not finite"
    if norm is not None and math.isfinite(norm):
        excess = times(norm, threshold)
        over = f", {number(excess, 3)} times the threshold of {number(threshold, 3)}" if excess is not None else ""
        was = f"The norm was {number(norm, 3)}{over}"
    if not event.culprits and not beside(event):
        return f"{was}."
    left = found.norm_after
    if left is None or not math.isfinite(left) or (not event.culprits and found.method == "none"):
        what = f"; without {it(event)} it is not known: {found.reason}" if event.culprits and found.reason else ""
        return f"{was}{what}."
    without = f"{was}; {''.join(bounded(left, found.error_bound, 3))} without {it(event)}"
    if not event.culprits:
        return f"{without}."
    if found.verdict == "explained":
        return f"{without}: the spike is explained."
    if found.verdict == "not_explained":
        return f"{without}, still over the threshold: {_else(event)}."
    return f"{without}. Whether that explains the spike is undecided: {found.reason}."


def _else(event: Event) -> str:
    """What the rest is, where that still spikes."""
    search = event.search
    if search.status != "max_culprits":
        return "something else spikes, too"
    if not search.num_more:
        return "as many culprits are named as search.max_culprits allows"
    carry = f" of about {number(search.more_norm, 3)}" if search.more_norm else ""
    return f"search.max_culprits ended the search, and at least {search.num_more} culprits{carry} are left"
