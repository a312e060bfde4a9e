# SPDX-License-Identifier: Apache-2.0
"""The published search, as published: the baseline of every comparison.

Enumerate the micro-batches and follow the one with the largest norm; halve its ranks, then its
tokens, always following the larger half; at last rebuild the gradient by running the step again.
For one culprit that is M + 2 ceil(log2 W) + 2 ceil(log2 T) + M forward-backwards, 3 f each.

The published rules stop where the larger half is under its threshold. Here the descent goes on, so
that every cell has the cost of a whole search; ``stopped_at`` says where the rules would have given
up. Probes are the core's exact parts of the gradient (the published ones re-normalise the loss).
"""

import math
from dataclasses import dataclass

from gradloc.core.probe import Prober
from gradloc.core.selection import Part, Token


@dataclass(frozen=True)
class Descent:
    """The token that the descent ended on."""

    token: Token
    norm: float
    stopped_at: str | None
    """The first phase whose largest part was under its threshold; None when none was."""


def descend(prober: Prober, tau: float) -> Descent:
    """One published search. ``.grad`` holds the whole step's gradient again afterwards.

    Args:
        prober: of the step; ``.grad`` set aside.
        tau: per-token threshold.
    """
    stopped_at = None
    size, total = prober.ranks.size, prober.step.num_micro_batches
    parts = [Part(index, 0, size) for index in range(total)]
    phase = "micro_batch"
    while True:
        probes = [(prober.measure(part), part) for part in parts]
        found, part = max(probes, key=lambda probe: probe[0].norm)
        is_over = not math.isfinite(found.norm) or found.norm > tau * found.weight_norm
        if not is_over and stopped_at is None:
            stopped_at = phase
        if part.num_ranks == 1 and found.num_tokens == 1:
            break
        phase = "rank" if part.num_ranks > 1 else "token"
        parts = part.halves(found.num_tokens)
    prober.compute((index, None) for index in range(total))
    token = Token(part.micro_batch, part.first_rank, part.first_token)
    return Descent(token, found.norm, stopped_at)


def formula_cost(num_micro_batches: int, num_ranks: int, tokens_per_micro_batch: int) -> float:
    """The cost of one published search, in f: 6M + 6 (log2 W + log2 T)."""
    return 6 * num_micro_batches + 6 * (math.log2(num_ranks) + math.log2(tokens_per_micro_batch))
