# SPDX-License-Identifier: Apache-2.0
"""Measure the norms of few culprits, for which shares only gave a lower bound, by the certificate's backwards, and
one more at most."""

import math
from collections.abc import Callable
from typing import Any

import torch

from .candidates import FEW
from .task import SearchResult, Span, Task, tokens_of, with_measured_norm, with_norm


def few_to_measure(task: Task, culprits: list[Span]) -> dict[str, Any]:
    """Return what has a certificate measure these one by one and put the norms in their places, if they are few; see
    :class:`..core.certificate.Removal`."""
    if len(culprits) > FEW or all(span.is_exact for span in culprits):
        return {}
    measured = [span for span in culprits if span.is_exact]
    at = {span.micro_batch for span in measured}
    parts = [[span for span in measured if span.micro_batch == index] for index in sorted(at)]
    parts += [[span] for span in culprits if not span.is_exact]
    parts.sort(key=lambda part: -max(span.norm for span in part))

    def take_norm(number: int, squares: torch.Tensor, dots: torch.Tensor) -> None:
        span = parts[number][0]
        if not span.is_exact:
            culprits[culprits.index(span)] = with_norm(task, span, task.culprit_norm, squares, dots)

    least = math.fsum(span.norm for span in culprits)
    return {"parts": [tokens_of(part) for part in parts], "least_norm": least, "on_part": take_norm}


def measure_last(task: Task, result: SearchResult, verify: Callable[[Span], Span]) -> None:
    """Measure the culprits that have only a bound so far, if that takes one backward at most.

    Where none is measured yet, the loudest takes none: its gradient is the spike less the others' and the residual.
    """
    culprits = sorted((culprit for culprit in result.culprits if not culprit.is_exact), key=lambda span: -span.norm)
    rest = result.rest if len(culprits) == len(result.culprits) else None
    others = culprits[rest is not None :]
    if not culprits or len(others) > 1 or not task.can_afford(backwards=len(others), is_certificate=True):
        return
    space, add = task.prober.space, task.prober.add
    found = {culprit: verify(culprit) for culprit in others}
    if rest is not None:
        taken = [(rest, -1.0), *((space.keep(), -1.0) for _ in others)]
        space.clear()
        for gradient, alpha in ((task.gradient, 1 / task.scale), *taken):
            add(gradient, alpha)
        found[culprits[0]] = with_measured_norm(task, culprits[0], task.culprit_norm)
    result.culprits = [found.get(culprit, culprit) for culprit in result.culprits]
