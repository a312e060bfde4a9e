# SPDX-License-Identifier: Apache-2.0
"""The driver's batch as the loop sees it, whatever the trainer keeps it in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.tracker import median_size

Rows = dict[str, Any]
"""One rank's rows on the host, or all of them: tensors (R, P) or (R, T) by name, and lists of names with one for each
row."""


@dataclass(frozen=True)
class BatchView:
    """A whole batch in the order in which its rows are dealt out to the ranks: R rows, P prompt, T response positions.

    What is not known is left out. A mapping may fetch a tensor when it is first asked for.
    """

    tensors: Mapping[str, torch.Tensor]
    """``input_ids``, ``attention_mask``, ``position_ids`` (R, P + T): prompts padded on the left, responses on the
    right; ``responses``, ``response_mask``, ``old_log_probs``, ``advantages`` and others (R, T). With pictures the
    position ids are (R, C, P + T)."""
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """``uid``, ``sequence_id``, ``data_source``, and ``multi_modal_inputs`` (tensors by name, or nothing): one for each
    row. A sequence may fetch a row when it is first asked for."""
    is_critics: bool = False
    """Whether the critic is updated: ``values`` (before the update) and ``returns`` (R, T) are there, too."""
    is_distilled: bool = False
    """Whether distillation is the whole loss; the tensors then have ``teacher_log_probs`` (R, T)."""
    # A loop without advantages has ``loss_weights`` (R, T): minus each token's d loss / d log_prob, times the number of
    # tokens, so 1 for the mean of the tokens' negative log-probs.

    def signal(self) -> tuple[str, torch.Tensor]:
        """What the loss pulls a token with: its name, and (R, T)."""
        if self.is_critics:
            return "value_error", self.tensors["returns"] - self.tensors["values"]
        if self.is_distilled:
            return "teacher_gap", self.tensors["teacher_log_probs"] - self.tensors["old_log_probs"]
        if "advantages" in self.tensors.keys():
            return "advantage", self.tensors["advantages"]
        return "loss_weight", self.tensors["loss_weights"]


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


def joined(by_rank: Sequence[Rows], on_the_left: Sequence[str] = ()) -> Rows:
    """Rows one below the other, tensors padded with 0 to the widest: those named on the left, others on the right."""
    found: Rows = {}
    for name, first in by_rank[0].items():
        parts = [rows[name] for rows in by_rank]
        if not isinstance(first, torch.Tensor):
            found[name] = [each for part in parts for each in part]
            continue
        width = max(part.shape[1] for part in parts)
        missing = [width - part.shape[1] for part in parts]
        pads = [(short, 0) if name in on_the_left else (0, short) for short in missing]
        found[name] = torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])
    return found


def at_first(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A number of each row (R,) at the row's first position, 0 at the others: as (R, T) ``token_level_scores``."""
    first = torch.zeros_like(mask[:1], dtype=torch.float32)
    first[:, :1] = 1.0
    return values.unsqueeze(1) * first
