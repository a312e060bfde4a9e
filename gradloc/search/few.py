# SPDX-License-Identifier: Apache-2.0
"""Measure the norms of few culprits, for which shares only gave a lower bound, by the certificate's backwards: a
search makes none for this alone."""

import math
from typing import Any

from .candidates import FEW
from .task import SearchResult, Span, Task, tokens_of, with_measured_norm


def few_to_measure(task: Task, culprits: list[Span]) -> dict[str, Any]:
    """Return what has a certificate measure these one by one and put the norms in their places, if they are few; see
    :class:`..core.certificate.Removal`."""
    if len(culprits) > FEW or all(span.is_exact for span in culprits):
        return {}
    measured = [span for span in culprits if span.is_exact]
    at = {span.micro_batch for span in measured}
    parts = [[span for span in measured if span.micro_batch == index] for index in sorted(at)]
    parts += [[span] for span in culprits if not span.is_exact]
    parts.sort(key=lambda part: max(span.norm for span in part))

    def measure(number: int) -> None:
        span = parts[number][0]
        if not span.is_exact:
            culprits[culprits.index(span)] = with_measured_norm(task, span, task.culprit_norm)

    least = math.fsum(span.norm for span in culprits)
    return {"parts": [tokens_of(part) for part in parts], "least_norm": least, "on_part": measure}


def measure_only(task: Task, result: SearchResult) -> None:
    """Measure the only culprit, where it has only a bound so far.

    That takes no backward: its gradient is the spike less the residual.
    """
    if len(result.culprits) != 1 or result.culprits[0].is_exact or result.rest is None:
        return
    task.prober.space.clear()
    for gradient, alpha in ((task.gradient, 1 / task.scale), (result.rest, -1.0)):
        task.prober.add(gradient, alpha)
    result.culprits = [with_measured_norm(task, result.culprits[0], task.culprit_norm)]
