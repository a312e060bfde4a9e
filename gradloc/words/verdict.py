# SPDX-License-Identifier: Apache-2.0
"""An event in a few sentences, for somebody who has never seen one. Pure, standard library only.

The first is the headline, which console, page and trackers share; then where the culprits are and why, what the norm
was and would have been, and what the optimizer was given.
"""

import math

from ..record import Culprit, Event, Search, Turn
from .culprits import leader
from .numbers import bounded, number
from .story import given, headline, lede, pronoun, step_cause
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
    if first is None or not first.positions:
        return ""
    start, position = "It is" if len(event.culprits) == 1 else "The largest is", first.positions[0]
    what = f"the token {quote(first)} at position {position}"
    if len(first.positions) > 1:
        what = f"{len(first.positions)} tokens from position {position}"
    row = "document" if event.is_supervised else "response"
    return f"{start} {what} of the {row} {_sequence(first)}{_turn(first.turn)}."


def _turn(turn: Turn | None) -> str:
    if turn is None:
        return ""
    after = f" after the tool's answer of {turn.num_before} tokens" if turn.num_before else ""
    return f", in turn {turn.number} of {turn.num_turns}{after}"


def _sequence(culprit: Culprit) -> str:
    if culprit.sequence_id is None:
        return f"in row {culprit.micro_batch_row} of micro-batch {culprit.micro_batch}, rank {culprit.rank}"
    uid, colon, index = culprit.sequence_id.rpartition(":")
    if not colon:  # a name of the loop's own
        return index if len(index) <= 40 else f"{index[:40]}..."
    return f"{uid if len(uid) <= 16 else uid[:8]}:{index}"  # verl's uids are 36 characters; 8 tell them apart


def _norms(event: Event) -> str:
    """The norm with and without what made it, and what that proves."""
    norm, threshold, certificate = event.trigger.grad_norm, event.trigger.threshold, event.certificate
    was = "The norm was not finite"
    if norm is not None and math.isfinite(norm):
        excess = times(norm, threshold)
        over = f", {number(excess, 3)} times the threshold of {number(threshold, 3)}" if excess is not None else ""
        was = f"The norm was {number(norm, 3)}{over}"
    left, is_culprits = certificate.norm_after, bool(event.culprits)
    if not is_culprits and (step_cause(event) is None or certificate.method == "none"):
        return f"{was}."
    if left is None or not math.isfinite(left):
        unknown = f"; the norm without {pronoun(event)} is not known: {certificate.reason}"
        return f"{was}{unknown if is_culprits and certificate.reason else ''}."
    without = f"{was}; {''.join(bounded(left, certificate.error_bound, 3))} without {pronoun(event)}"
    if not is_culprits:
        return f"{without}."
    if certificate.verdict == "explained":
        return f"{without}: the spike is explained."
    if certificate.verdict == "not_explained":
        return f"{without}, still over the threshold: {_rest(event.search)}."
    return f"{without}. Whether that explains the spike is undecided: {certificate.reason}."


def _rest(search: Search) -> str:
    """What is left where the norm is still over the threshold."""
    if not search.num_more:
        return "something else spikes, too"
    norm = f" of about {number(search.more_norm, 3)}" if search.more_norm else ""
    return f"search.max_culprits ended the search, and at least {search.num_more} culprits{norm} are left"
