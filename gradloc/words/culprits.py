# SPDX-License-Identifier: Apache-2.0
"""Which culprit a sentence begins with, and what culprits carry: the same on console and page, and in the record."""

import math
from collections.abc import Sequence

from ..record import Culprit, Event
from .numbers import percent, with_error


def by_size(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Largest first: by share where each has one, else by norm. What is not finite, or not known, comes first."""
    names = ("share", "grad_norm") if all(culprit.share is not None for culprit in culprits) else ("grad_norm",)
    return sorted(culprits, key=lambda culprit: [_size(getattr(culprit, name)) for name in names], reverse=True)


def leader(culprits: Sequence[Culprit]) -> Culprit | None:
    """The largest of them; None without any."""
    return next(iter(by_size(culprits)), None)


def _size(value: float | None) -> float:
    return abs(value) if value is not None and math.isfinite(value) else math.inf


def trusted_share(event: Event, culprit: Culprit) -> float | None:
    """The culprit's share; None where it is no backward's own, but of tokens' shares that do not add up."""
    is_trusted = culprit.is_exact or event.shares is None or event.shares.is_trusted
    return culprit.share if is_trusted else None


def carried(event: Event, culprits: Sequence[Culprit]) -> str | None:
    """What these culprits carry of the gradient together, and its standard error: ``75% +- 0.3%``.

    Args:
        event: theirs.
        culprits: some, or all of them.

    Returns:
        None where the share of one is not known, or cannot be trusted.
    """
    shares = [trusted_share(event, culprit) for culprit in culprits]
    known = [found for found in shares if found is not None and math.isfinite(found)]
    if not known or len(known) < len(shares):
        return None
    error = math.hypot(*(culprit.share_error or 0.0 for culprit in culprits))
    return with_error(sum(known), error, 3, percent)


def shares_sentence(event: Event) -> str:
    """What the measured shares add up to, and what that means; empty where they were not measured."""
    if event.shares is None:
        return ""
    total = with_error(event.shares.closure, event.shares.closure_error)
    if event.shares.is_trusted:
        return f"The measured shares add up to {total}."
    instead = "Norms are used instead; a share that is still shown was measured by its own backward"
    return f"The tokens' shares do not add up: their sum is {total}, not 1. {instead}."
