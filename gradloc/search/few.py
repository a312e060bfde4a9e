# SPDX-License-Identifier: Apache-2.0
"""Measure the norms of few culprits, for which shares only gave a lower bound: within the certificate where that
subtracts them, else by backwards of their own."""

import math
from collections.abc import Callable
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


def measure_few(task: Task, result: SearchResult, verify: Callable[[Span], Span], is_split: bool) -> None:
    """Measure those of few culprits that have only a bound so far. The loudest one's gradient takes no backward: it is
    the spike less the others' gradients and the residual, unless a part without tokens was split off."""
    space, add = task.prober.space, task.prober.add
    culprits = sorted((culprit for culprit in result.culprits if not culprit.is_exact), key=lambda span: -span.norm)
    is_whole = len(culprits) == len(result.culprits) and result.rest is not None and not is_split
    to_verify, found, total = culprits[is_whole:], {}, None
    is_few = 0 < len(culprits) <= FEW
    if not is_few or not task.can_afford(backwards=len(to_verify), is_certificate=True):
        return
    for culprit in to_verify:
        found[culprit] = verify(culprit)
        if is_whole:
            if total is not None:
                add(total)
            total = space.keep()
    if is_whole:
        space.clear()
        for gradient, alpha in ((task.gradient, 1 / task.scale), (result.rest, -1.0), (total, -1.0)):
            if gradient is not None:
                add(gradient, alpha)
        found[culprits[0]] = with_measured_norm(task, culprits[0], task.culprit_norm)
    result.culprits = [found.get(culprit, culprit) for culprit in result.culprits]
