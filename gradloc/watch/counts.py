# SPDX-License-Identifier: Apache-2.0
"""The sizes of a step on all ranks, exchanged by one small sum before it is checked."""

from typing import Any, NamedTuple

import torch

from ..core.ranks import Ranks


class StepCounts(NamedTuple):
    """Numbers of a step, each with one entry per rank."""

    tokens: list[float]
    rows: list[float]
    micro_batches: list[float]
    scaled: list[float]
    """1 where a forward is in float16: its loss may be scaled."""
    opened: list[float]
    """1 where all forwards returned the log-probs that the loss is made of."""

    @classmethod
    def gather(cls, step: Any, ranks: Ranks) -> "StepCounts":
        """Count this rank's step, zeros for None, and exchange the counts. All ranks call this together."""
        mine = [0.0] * len(cls._fields)
        if step is not None and step.micro_batches:
            is_scaled = any(each.dtype == torch.float16 for each in step.micro_batches)
            mine = [float(each) for each in (*step.counts(), step.num_micro_batches, is_scaled, step.has_log_probs)]
        everyones = [0.0] * (len(mine) * ranks.size)
        everyones[ranks.rank :: ranks.size] = mine
        counts = ranks.sum(everyones)
        return cls(*(counts[first : first + ranks.size] for first in range(0, len(counts), ranks.size)))
