# SPDX-License-Identifier: Apache-2.0
"""The driver's batch as the loop sees it, whatever the trainer keeps it in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.tracker import median_size

Rows = dict[str, Any]
"""One rank's rows on the host, or all of them: tensors (R, P) or (R, T) by name, and lists of names with one for each
row."""

NO_TOKEN = -1
"""Id in the place of a token, where a row's positions are none: of a classifier, of pictures."""
_SAMPLED = 2**20  # tokens that a batch's typical signal is taken from, evenly spread; of smaller batches all


@dataclass(frozen=True)
class RowFacts:
    """A few numbers of each of R rows, from which statistics of healthy steps are made, however long rows are."""

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
        """Read them off tensors (R, T)."""
        num_tokens, first = mask.sum(-1), mask.new_zeros(len(mask), dtype=torch.long)
        late = (mask[:, 0] == 0).nonzero().flatten()
        first[late] = (mask[late] != 0).int().argmax(1)
        apart = max(signal.numel() // _SAMPLED, 1)
        sample = torch.where(mask[:, ::apart] != 0, signal[:, ::apart], 0.0)
        rewards = None if scores is None else scores.sum(-1)
        return cls(num_tokens, signal.gather(1, first.unsqueeze(1)).squeeze(1), sample.flatten(), rewards)

    @classmethod
    def from_nested(cls, mask: Any, signal: Any, scores: Any = None) -> "RowFacts":
        """Read them off nested tensors whose rows have no padding: no padded copy is made."""
        offsets, is_token, values = mask.offsets().cpu().numpy(), mask.values().numpy(), signal.values()
        num_tokens = torch.from_numpy(_sums(is_token, offsets))
        first = offsets[:-1].copy()
        for row in np.flatnonzero(is_token[np.minimum(first, len(is_token) - 1)] == 0):
            first[row] += int(np.argmax(is_token[offsets[row] : offsets[row + 1]])) if num_tokens[row] else 0
        apart = max(len(values) // _SAMPLED, 1)
        sample = torch.where(mask.values()[::apart] != 0, values[::apart], 0.0)
        rewards = None if scores is None else torch.from_numpy(_sums(scores.values().numpy(), offsets))
        return cls(num_tokens, values[torch.from_numpy(np.minimum(first, len(values) - 1))], sample, rewards)

    def chosen(self, rows: torch.Tensor) -> "RowFacts":
        """Return the facts of these rows, in this order; the sample stays the whole batch's."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return RowFacts(**{name: v if name == "sample" or v is None else v[rows] for name, v in found.items()})


def _sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum runs of values, (R,); 0 for an empty run."""
    ends = np.minimum(offsets[:-1], max(len(values) - 1, 0))
    return np.where(np.diff(offsets) > 0, np.add.reduceat(values, ends), 0).astype(values.dtype)


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
    known: Callable[[], RowFacts] | None = None
    """Gives the facts where the trainer has them at less than the price of its tensors."""
    # A loop without advantages has ``loss_weights`` (R, T): minus each token's d loss / d log_prob, times the number of
    # tokens, so 1 for the mean of the tokens' negative log-probs.

    @cached_property
    def facts(self) -> RowFacts:
        """The numbers of each row from which statistics of healthy steps are made."""
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
        given, name = self.tensors, self.signal_name
        if name == "value_error":
            return name, given["returns"] - given["values"]
        if name == "teacher_gap":
            return name, given["teacher_log_probs"] - given["old_log_probs"]
        return name, given["advantages" if name == "advantage" else "loss_weights"]


def batch_scale(batch: BatchView, coefficients: Iterable[float]) -> dict[str, float]:
    """Return a few robust numbers of a batch, for :class:`~..trigger.history.ScaleHistory`.

    Args:
        batch: the whole.
        coefficients: median |d loss / d log_prob| of each rank.

    Returns:
        The median |advantage| and coefficient of tokens whose is not zero, the median number of response tokens of a
        row, and that of all rows together. In the advantage's place of a critic |return - value|, under distillation
        how far the teacher's log-prob is from the old one.
    """
    facts = batch.facts
    known = sorted(value for value in coefficients if value > 0)
    return {
        batch.signal_name: median_size([facts.sample]),
        "coefficient": known[len(known) // 2] if known else 0.0,
        "length": float(facts.num_tokens.median()),
        "tokens": float(facts.num_tokens.sum()),
    }


def as_arrays(rows: Rows) -> Rows:
    """Return rows with NumPy's arrays, which pickle ten times as fast as tensors, where NumPy has the dtype."""
    are_known = {name: isinstance(each, torch.Tensor) and each.dtype != torch.bfloat16 for name, each in rows.items()}
    return {name: each.numpy() if are_known[name] else each for name, each in rows.items()}


def joined(by_rank: Sequence[Rows], on_the_left: Sequence[str] = ()) -> Rows:
    """Stack rows, tensors padded with 0 to the widest: those named on the left, others on the right."""
    found: Rows = {}
    for name, first in by_rank[0].items():
        if isinstance(first, list):
            found[name] = [each for rows in by_rank for each in rows[name]]
            continue
        parts = [torch.as_tensor(rows[name]) for rows in by_rank]
        width = max(part.shape[1] for part in parts)
        missing = [width - part.shape[1] for part in parts]
        pads = [(short, 0) if name in on_the_left else (0, short) for short in missing]
        found[name] = torch.cat([torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)])
    return found


def at_first(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put a number of each row (R,) at the row's first position, 0 at others, like (R, T) ``token_level_scores``."""
    first = torch.zeros_like(mask[:1], dtype=torch.float32)
    first[:, :1] = 1.0
    return values.unsqueeze(1) * first
