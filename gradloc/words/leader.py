# SPDX-License-Identifier: Apache-2.0
"""Which culprit a sentence begins with: the same one on the console, the page and in the event's cause."""

import math
from collections.abc import Sequence

from ..record import Culprit


def by_size(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Largest first: by share where each has one, else by norm. What is not finite, or not known, comes first."""
    names = ("share", "grad_norm") if all(culprit.share is not None for culprit in culprits) else ("grad_norm",)
    return sorted(culprits, key=lambda culprit: [_size(getattr(culprit, name)) for name in names], reverse=True)


def leader(culprits: Sequence[Culprit]) -> Culprit | None:
    """The largest of them; None without any."""
    return next(iter(by_size(culprits)), None)


def _size(value: float | None) -> float:
    return abs(value) if value is not None and math.isfinite(value) else math.inf
