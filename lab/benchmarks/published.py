# SPDX-License-Identifier: Apache-2.0
"""The published search, the baseline of comparisons.

Probe the micro-batches and follow the one with the largest norm; halve its ranks, then its tokens, always following the
larger half; then recompute the gradient by running the step again. For one culprit that is
M + 2 ceil(log2 W) + 2 ceil(log2 T) + M forward-backwards, 3 f each.

The published rules stop if the larger half is under its threshold. Here the descent continues, so that the cost is that
of a whole search. Probes are the core's exact parts of the gradient; the published ones re-normalise the loss.
"""

from gradloc.core.probe import Prober
from gradloc.core.selection import Part, Token


def descend(prober: Prober) -> tuple[Token, float]:
    """Search once; return the token and its norm, and leave the whole step's gradient in ``.grad``.

    Args:
        prober: the step's prober, with ``.grad`` set aside.
    """
    total = prober.step.num_micro_batches
    parts = [Part(index, 0, prober.ranks.size) for index in range(total)]
    while True:
        probes = [(prober.measure(part), part) for part in parts]
        found, part = max(probes, key=lambda probe: probe[0].norm)
        if part.num_ranks == 1 and found.num_tokens == 1:
            break
        parts = part.halves(found.num_tokens)
    prober.compute((index, None) for index in range(total))
    return Token(part.micro_batch, part.first_rank, part.first_token), found.norm
