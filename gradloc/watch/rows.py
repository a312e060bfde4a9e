# SPDX-License-Identifier: Apache-2.0
"""The rows of a step as the driver reads them: their number, a summary of each, or all ranks' as one batch.

Shapes: B rows of a micro-batch, T positions.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.ranks import Ranks
from ..loop.batch import BatchView, Rows, stack_rows
from ..loop.driver import sequence_ids


class StepCounts(NamedTuple):
    """Numbers of a step, each with one entry per rank; one small sum exchanges them before the step is checked."""

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
            is_scaled = any(each.forwarded.dtype == torch.float16 for each in step.micro_batches)
            mine = [float(each) for each in (*step.counts(), step.num_micro_batches, is_scaled, step.has_log_probs)]
        everyones = [0.0] * (len(mine) * ranks.size)
        everyones[ranks.rank :: ranks.size] = mine
        counts = ranks.sum(everyones)
        return cls(*(counts[first : first + ranks.size] for first in range(0, len(counts), ranks.size)))


def attention_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return an attention mask of rows whose padding follows the last token that is trained on."""
    positions = torch.arange(mask.shape[1]) * mask
    return (torch.arange(mask.shape[1]) <= positions.amax(1, keepdim=True)).long()


def summaries(masks: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[tuple[int, float]]:
    """Return each row's number of tokens and their median value, of micro-batches' bool (B, T) and values (B, T)."""
    rows = [
        row[kept]
        for row_values, mask in zip(values, masks, strict=True)
        for row, kept in zip(row_values, mask, strict=True)
    ]
    return [(len(row), float(row.median()) if len(row) else 0.0) for row in rows]


def view_of(by_rank: Sequence[Rows]) -> BatchView:
    """Join all ranks' rows, one rank after the other; names that occur more than once are those of prompts."""
    shared = set.intersection(*(set(rows) for rows in by_rank))
    rows = stack_rows([{name: part[name] for name in by_rank[0] if name in shared} for part in by_rank])
    names = rows.pop("names")
    rows["input_ids"] = rows["responses"]
    rows["loss_weights"] = rows["loss_weights"] * int(rows["response_mask"].sum())
    if "advantages" in rows:
        del rows["loss_weights"]
    labels = {"sequence_id": names} if any(names) else {}
    if max(Counter(names).values()) > 1 and any(names):
        labels = {"uid": names, "sequence_id": sequence_ids(names)}
    return BatchView(rows, labels)


def view_of_summaries(by_rank: Sequence[list[tuple[int, float]]], signal: str) -> BatchView:
    """Return a batch of the rows in each rank's :func:`summaries`, with one signal per row, such as ``advantages``:
    enough to learn what is typical."""
    lengths, values = torch.tensor([row for rows in by_rank for row in rows]).T
    if signal == "loss_weights":  # in view_of's unit
        values = values * lengths.sum()
    mask = torch.tensor(range(int(lengths.max()))) < lengths.unsqueeze(1)
    return BatchView({"response_mask": mask, signal: values.unsqueeze(1).expand_as(mask)}, {})
