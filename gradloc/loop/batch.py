# SPDX-License-Identifier: Apache-2.0
"""The driver's batch as the loop sees it, whatever the trainer keeps it in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.tracker import median_size


@dataclass(frozen=True)
class BatchView:
    """A whole batch in the order in which its rows are dealt out to the ranks: R rows, P prompt, T response positions.

    What is not known is left out. A mapping may fetch a tensor when it is first asked for.
    """

    tensors: Mapping[str, torch.Tensor]
    """``input_ids``, ``attention_mask``, ``position_ids`` (R, P + T): prompts padded on the left, responses on the
    right; ``responses``, ``response_mask``, ``old_log_probs``, ``advantages`` and others (R, T). With pictures the
    position ids are (R, C, P + T)."""
    labels: Mapping[str, Sequence[Any]]
    """``uid``, ``sequence_id``, ``data_source``, and ``multi_modal_inputs`` (tensors by name, or nothing): one for each
    row. A sequence may fetch a row when it is first asked for."""
    is_critics: bool = False
    """Whether the critic is updated: ``values`` (before the update) and ``returns`` (R, T) are there, too."""
    is_distilled: bool = False
    """Whether distillation is the whole loss; the tensors then have ``teacher_log_probs`` (R, T)."""

    def signal(self) -> tuple[str, torch.Tensor]:
        """What the loss pulls a token with: its name, and (R, T)."""
        if self.is_critics:
            return "value_error", self.tensors["returns"] - self.tensors["values"]
        if self.is_distilled:
            return "teacher_gap", self.tensors["teacher_log_probs"] - self.tensors["old_log_probs"]
        return "advantage", self.tensors["advantages"]


def batch_scale(batch: BatchView, coefficients: Iterable[float]) -> dict[str, float]:
    """A few robust numbers of a batch, for :class:`~..core.history.ScaleHistory`.

    Args:
        batch: the whole.
        coefficients: median |d loss / d log_prob| of each rank.

    Returns:
        The median |advantage| and coefficient of tokens whose is not zero, the median number of response tokens of a
        row, and that of all rows together. In the advantage's place of a critic |return - value|, under distillation
        how far the teacher's log-prob is from the old one.
    """
    mask = batch.tensors["response_mask"].bool()
    known = sorted(value for value in coefficients if value > 0)
    name, values = batch.signal()
    return {
        name: median_size([values[mask].float()]),
        "coefficient": known[len(known) // 2] if known else 0.0,
        "length": float(mask.sum(-1).median()),
        "tokens": float(mask.sum()),
    }
