# SPDX-License-Identifier: Apache-2.0
"""Decide whether the batch as a whole is the culprit, by one rule, with or without a history of the run.

Take away the largest k of N tokens. Were all equal, and their gradients orthogonal, sqrt(1 - k / N) of the norm would
remain. Culprits leave far less. In a batch that is scaled as a whole, the loss pulls the loudest tokens no more than
others, and without them the batch is still too large, or they are a good part of it.

The *pull* is a token's coefficient over its weight in the loss, so it does not depend on how rows are averaged: 1 for a
likelihood, the advantage for a policy's loss.
"""

import math
from collections.abc import Sequence

from ..record import Certificate
from ..trigger.history import UNUSUAL
from .candidates import compute_pulls, find_usual_pull, sum_products
from .share import ShareMap
from .task import Span, Task

_FEWER = 4.0  # times: culprits are at least that much fewer than equal tokens that would leave as little


def is_spread(task: Task, shares: ShareMap, spans: Sequence[Span]) -> bool:
    """Return whether these, all that may be culprits, leave most of R to others, and the loss pulls none of
    them more. A few that leave no spike do not.
    """
    threshold, carried = task.spike.threshold, sum_products(task, shares, spans)
    if threshold is None or carried >= shares.square / 2:
        return False
    if shares.square - carried <= threshold**2 and _are_few(task, spans, carried / shares.square):
        return False
    return not any(_pulls(task, spans)[0])


def _are_few(task: Task, spans: Sequence[Span], part: float) -> bool:
    """Return whether these are far fewer than equal tokens that carry this part of the squared norm."""
    return _FEWER * sum(span.size for span in spans) <= task.spike.num_tokens * part


def keep_culprits(task: Task, culprits: Sequence[Span], found: Certificate) -> list[Span]:
    """Return those that the batch is not to blame for. Where it is not scaled, these are all."""
    rest, before = found.norm_after, task.spike.grad_norm
    if task.spike.threshold is None or rest is None or not math.isfinite(rest):
        return list(culprits)
    stand_out, is_scaled = _pulls(task, culprits)
    are_few = _are_few(task, culprits, 1 - (rest / before) ** 2)
    if not is_scaled or (rest <= task.spike.threshold and are_few):
        return list(culprits)
    return [span for span, is_pulled in zip(culprits, stand_out, strict=True) if is_pulled]


def _pulls(task: Task, spans: Sequence[Span]) -> tuple[list[bool], bool]:
    """Return of each span whether the loss pulls one of its tokens more than chance pulls any; and whether the batch is
    scaled as a whole."""
    step, ranks, usual = task.prober.step, task.prober.ranks, find_usual_pull(task)

    def local() -> list[float]:
        pulls = [pull[step.token_mask(index)] for index, pull in enumerate(compute_pulls(task))]
        own = [span.rank == ranks.rank for span in spans]
        there = [pulls[span.micro_batch][span.start : span.end] for span in spans]
        return [float(each.max()) if is_own else 0.0 for is_own, each in zip(own, there, strict=True)]

    least = UNUSUAL * math.sqrt(2 * math.log(max(task.spike.num_tokens, 2))) * usual.most
    mine = ranks.run_local_synced(local)
    return [pull >= least for pull in (ranks.max(mine) if mine else [])], usual.is_scaled
