# SPDX-License-Identifier: Apache-2.0
"""What a culprit's row is like beside the batch's others, for the causes of a loop without advantages.

Shapes: R rows, T positions.
"""

import statistics
from typing import Any

import torch

from ..record import Culprit
from ..words.documents import Document, foreign_in, repeats_in, unspaced_in
from .batch import BatchView


class Documents:
    """All rows of a batch that has ``log_probs`` (R, T), and where logits were seen ``ranks`` and ``shifted`` (R, T).

    Args:
        batch: of a loop.
        tokenizer: decodes the rows; None: nothing is said of their text.
    """

    def __init__(self, batch: BatchView, tokenizer: Any):
        tensors = batch.tensors
        self._tensors, self._mask = tensors, tensors["response_mask"].bool()
        self._pad = getattr(tokenizer, "pad_token_id", None)
        self._rows = [ids[kept].tolist() for ids, kept in zip(tensors["responses"], self._mask, strict=True)]
        self._log_probs = [self._mean("log_probs", row) for row in range(len(self._rows))]
        texts = ["" if tokenizer is None else str(tokenizer.decode(ids)) for ids in self._rows]
        self._looks = {
            "tokens": [float(len(ids)) for ids in self._rows],
            "repeats": [repeats_in(ids) for ids in self._rows],
            "foreign": [foreign_in(text) for text in texts],
            "unspaced": [unspaced_in(text) for text in texts],
        }

    def of(self, culprit: Culprit) -> Document:
        """The culprit's."""
        row, ids = culprit.row, self._rows[culprit.row or 0]
        assert row is not None  # the driver numbers the rows
        others = [at for at in range(len(self._rows)) if at != row] or [row]
        looks = {name: values[row] for name, values in self._looks.items()}
        usual = {f"{n}_of_batch": statistics.median(v[at] for at in others) for n, v in self._looks.items()}
        known = [value for at in others if (value := self._log_probs[at]) is not None]
        return Document(
            **looks,
            **usual,
            log_prob=self._log_probs[row],
            log_prob_of_batch=statistics.median(known) if known else None,
            log_prob_shifted=self._mean("shifted", row),
            copies=sum(other == ids for other in self._rows) - 1,
            rows=len(self._rows),
            padding=self._padding(culprit),
            rank=self._at("ranks", culprit),
        )

    def _mean(self, name: str, row: int) -> float | None:
        if name not in self._tensors.keys():
            return None
        values = self._tensors[name][row][self._mask[row]]
        values = values[torch.isfinite(values)]
        return float(values.mean()) if len(values) else None

    def _at(self, name: str, culprit: Culprit) -> int | None:
        if name not in self._tensors.keys() or culprit.peak is None:
            return None
        value = int(self._tensors[name][culprit.row, culprit.peak])
        return value if value >= 0 else None

    def _padding(self, culprit: Culprit) -> int:
        """How many equal tokens end the row's part that is trained on, the culprit among them; of a tokenizer with a
        padding token those alone."""
        ids, last = self._rows[culprit.row or 0], (culprit.token_ids or (-1,))[-1]
        if not ids or last != ids[-1] or self._pad not in (None, last):
            return 0
        return next((at for at, token in enumerate(reversed(ids)) if token != last), len(ids))
