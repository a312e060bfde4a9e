# SPDX-License-Identifier: Apache-2.0
"""Is the batch the culprit, and no few tokens of it? One rule, with or without a history of the run.

Take away the largest k of N tokens. Were all equal, and their gradients orthogonal, sqrt(1 - k / N) of the norm would
be left. Culprits leave far less. In a batch that is scaled as a whole, the loudest are tokens as all others are: the
loss pulls them no more, and without them the batch is still too large, or they are a good part of it.

How a loss is averaged, such as over each row's tokens, is no pull: coefficients are taken over the tokens' weights. A
likelihood then pulls with 1, and a policy's loss with the advantage.
"""

import math
from collections.abc import Sequence

from ..record import Certificate
from .candidates import MUCH, STRONG, carried, pulls_of, usual_pulls
from .share import ShareMap
from .task import Span, Task

_ORDINARY = 3.0  # a pull: normed advantages are of order one, so with more the batch is scaled
_FEWER = 4.0  # times: culprits are so many times fewer than equal tokens that would leave as little


def is_spread(task: Task, shares: ShareMap, spans: Sequence[Span]) -> bool:
    """Whether these, all that may be culprits, leave most of R to others, and the loss pulls none of them more."""
    if task.spike.threshold is None or carried(task, shares, spans) >= MUCH * shares.square:
        return False
    return not any(_pulls(task, spans)[0])


def culprits_of(task: Task, culprits: Sequence[Span], found: Certificate) -> list[Span]:
    """Return those that the batch is not to blame for. Where it is not scaled, these are all."""
    rest, before = found.norm_after, task.spike.grad_norm
    if task.spike.threshold is None or rest is None or not math.isfinite(rest):
        return list(culprits)
    stand_out, is_scaled = _pulls(task, culprits)
    num_equal = task.spike.num_tokens * (1 - (rest / before) ** 2)  # so many would leave as little
    are_few = _FEWER * sum(span.size for span in culprits) <= num_equal
    if not is_scaled or (rest <= task.spike.threshold and are_few):
        return list(culprits)
    return [span for span, is_pulled in zip(culprits, stand_out, strict=True) if is_pulled]


def _pulls(task: Task, spans: Sequence[Span]) -> tuple[list[bool], bool]:
    """Of each span, whether its loss pulls a token more than chance pulls any of the batch's; if that is scaled."""
    step, ranks, (usual, most) = task.prober.step, task.prober.ranks, usual_pulls(task)

    def local() -> list[float]:
        pulls = [pull[step.token_mask(index)] for index, pull in enumerate(pulls_of(task))]
        own = [span.rank == ranks.rank for span in spans]
        there = [pulls[span.micro_batch][span.start : span.end] for span in spans]
        return [float(each.max()) if is_own else 0.0 for is_own, each in zip(own, there, strict=True)]

    least = STRONG * math.sqrt(2 * math.log(max(task.spike.num_tokens, 2))) * most
    mine = ranks.run_local_synced(local)
    return [pull >= least for pull in (ranks.max(mine) if mine else [])], usual > _ORDINARY
