# SPDX-License-Identifier: Apache-2.0
"""Give the loop one view of the driver's batch, whatever the trainer keeps it in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.tracker import median_size

Rows = dict[str, Any]
"""One rank's rows on the host, or all of them: tensors (R, P) or (R, T) by name, and lists with an entry for each
row."""

NO_TOKEN = -1
"""Token id of a position that is no token, as in a classifier's rows or in pictures."""
_MAX_SAMPLED = 2**20  # positions that a batch's typical signal is taken from, at even distances; all of a smaller batch


@dataclass(frozen=True)
class RowFacts:
    """A few numbers for each of R rows, of any length: enough for the statistics of healthy steps."""

    num_tokens: torch.Tensor
    """int64 (R,): response tokens."""
    signal: torch.Tensor
    """float (R,): the training signal of the row's first response token, see :meth:`BatchView.signal`."""
    sample: torch.Tensor
    """float (N,): the training signal of some tokens of all rows; 0 for positions that are no response token."""
    rewards: torch.Tensor | None = None
    """float (R,): sums of the token-level scores; None where they are not known."""

    @classmethod
    def from_padded(cls, mask: torch.Tensor, signal: torch.Tensor, scores: torch.Tensor | None = None) -> "RowFacts":
        """Read the facts off tensors (R, T)."""
        first = mask.new_zeros(len(mask), dtype=torch.long)
        begins_later = (mask[:, 0] == 0).nonzero().flatten()
        first[begins_later] = (mask[begins_later] != 0).int().argmax(1)
        stride = max(signal.numel() // _MAX_SAMPLED, 1)
        sample = torch.where(mask[:, ::stride] != 0, signal[:, ::stride], 0.0)
        rewards = None if scores is None else scores.sum(-1)
        return cls(mask.sum(-1), signal.gather(1, first.unsqueeze(1)).squeeze(1), sample.flatten(), rewards)

    @classmethod
    def from_nested(cls, mask: Any, signal: Any, scores: Any = None) -> "RowFacts":
        """Read the facts off nested tensors, whose rows have no padding, without a padded copy."""
        offsets, is_token, values = mask.offsets().cpu().numpy(), mask.values().numpy(), signal.values()
        num_tokens = torch.from_numpy(_sums(is_token, offsets))
        first = offsets[:-1].copy()
        for row in np.flatnonzero(is_token[np.minimum(first, len(is_token) - 1)] == 0):
            if num_tokens[row]:
                first[row] += int(np.argmax(is_token[offsets[row] : offsets[row + 1]]))
        stride = max(len(values) // _MAX_SAMPLED, 1)
        sample = torch.where(mask.values()[::stride] != 0, values[::stride], 0.0)
        rewards = None if scores is None else torch.from_numpy(_sums(scores.values().numpy(), offsets))
        return cls(num_tokens, values[torch.from_numpy(np.minimum(first, len(values) - 1))], sample, rewards)

    def at(self, rows: torch.Tensor) -> "RowFacts":
        """Return the facts of these rows, in this order; the sample stays the whole batch's."""
        rewards = None if self.rewards is None else self.rewards[rows]
        return replace(self, num_tokens=self.num_tokens[rows], signal=self.signal[rows], rewards=rewards)


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum the values of each row, which begins at its offset: (R,); 0 for an empty row."""
    starts = np.minimum(offsets[:-1], max(len(values) - 1, 0))  # an empty last row begins behind the values
    return np.where(np.diff(offsets) > 0, np.add.reduceat(values, starts), 0).astype(values.dtype)


@dataclass(frozen=True)
class BatchView:
    """A whole batch in the order in which its rows are dealt out to the ranks: R rows, P prompt, T response positions.

    Tensors and labels that the trainer does not know are left out. A mapping may fetch a tensor when it is first read.
    """

    tensors: Mapping[str, torch.Tensor]
    """``input_ids``, ``attention_mask``, ``position_ids`` (R, P + T): prompts padded on the left, responses on the
    right; ``responses``, ``response_mask``, ``old_log_probs``, ``advantages`` and others (R, T). With pictures the
    position ids are (R, C, P + T)."""
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """``uid``, ``sequence_id``, ``data_source``, and ``multi_modal_inputs`` (tensors by name, or nothing): one for each
    row. A sequence may fetch a row when it is first read."""
    is_critics: bool = False
    """Whether the critic is updated: ``values`` (before the update) and ``returns`` (R, T) are there, too."""
    is_distilled: bool = False
    """Whether distillation is the whole loss; the tensors then have ``teacher_log_probs`` (R, T)."""
    known: Callable[[], RowFacts] | None = None
    """Returns the facts, where the trainer can do so without fetching all tensors."""
    # A loop without advantages has ``loss_weights`` (R, T): minus each token's d loss / d log_prob, times the number of
    # tokens, so 1 for the mean of the tokens' negative log-probs.

    @cached_property
    def facts(self) -> RowFacts:
        """The numbers of each row that the statistics of healthy steps are made of."""
        if self.known is not None:
            return self.known()
        names, mask = self.tensors.keys(), self.tensors["response_mask"]
        scores = self.tensors["token_level_scores"] if "token_level_scores" in names else None
        has_signal = self.signal_name != "loss_weight" or "loss_weights" in names
        return RowFacts.from_padded(mask, self.signal()[1] if has_signal else torch.zeros_like(mask), scores)

    @property
    def num_tokens(self) -> torch.Tensor:
        """int (R,): response tokens of each row; no other column is read for them."""
        return self.facts.num_tokens if self.known is not None else self.tensors["response_mask"].sum(-1)

    @property
    def signal_name(self) -> str:
        """The name of the per-token training signal."""
        if self.is_critics:
            return "value_error"
        if self.is_distilled:
            return "teacher_gap"
        return "advantage" if self.known is not None or "advantages" in self.tensors.keys() else "loss_weight"

    def signal(self) -> tuple[str, torch.Tensor]:
        """Return the per-token training signal: its name, and (R, T)."""
        tensors, name = self.tensors, self.signal_name
        if name == "value_error":
            return name, tensors["returns"] - tensors["values"]
        if name == "teacher_gap":
            return name, tensors["teacher_log_probs"] - tensors["old_log_probs"]
        return name, tensors["advantages" if name == "advantage" else "loss_weights"]


def batch_scale(batch: BatchView, coefficients: Iterable[float]) -> dict[str, float]:
    """Return a few robust numbers of a batch, for :class:`~..trigger.history.ScaleHistory`.

    Args:
        batch: the whole batch.
        coefficients: median |d loss / d log_prob| of each rank.

    Returns:
        By name: the median size of the training signal and of the coefficients, of tokens where it is not zero; the
        median number of response tokens of a row, ``length``, and the number of all rows together, ``tokens``.
    """
    facts = batch.facts
    positive = sorted(value for value in coefficients if value > 0)
    return {
        batch.signal_name: median_size([facts.sample]),
        "coefficient": positive[len(positive) // 2] if positive else 0.0,
        "length": float(facts.num_tokens.median()),
        "tokens": float(facts.num_tokens.sum()),
    }


def as_arrays(rows: Rows) -> Rows:
    """Return rows with NumPy arrays, which pickle ten times as fast as tensors; bfloat16, which NumPy lacks, stays."""
    found: Rows = {}
    for name, values in rows.items():
        has_array = isinstance(values, torch.Tensor) and values.dtype != torch.bfloat16
        found[name] = values.numpy() if has_array else values
    return found


def stack_rows(by_rank: Sequence[Rows], left_padded: Sequence[str] = ()) -> Rows:
    """Stack all ranks' rows; pad tensors with 0 to the widest, on the right or, those named, on the left."""
    found: Rows = {}
    for name, first in by_rank[0].items():
        if isinstance(first, list):
            found[name] = [each for rows in by_rank for each in rows[name]]
            continue
        parts = [torch.as_tensor(rows[name]) for rows in by_rank]
        width = max(part.shape[1] for part in parts)
        missing = [width - part.shape[1] for part in parts]
        pads = [(short, 0) if name in left_padded else (0, short) for short in missing]
        found[name] = torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])
    return found


def at_first(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put a number of each row (R,) at the row's first position, 0 at others, like (R, T) ``token_level_scores``."""
    first = torch.zeros_like(mask[:1], dtype=torch.float32)
    first[:, :1] = 1.0
    return values.unsqueeze(1) * first
