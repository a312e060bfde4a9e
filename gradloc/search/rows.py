# SPDX-License-Identifier: Apache-2.0
"""Which spans of one row are worth naming: single tokens, a run of them, or the whole row. Pure arithmetic.

Shapes: n response tokens of one row.
"""

from collections.abc import Iterator

import torch

from .share import shrunk

_WINDOW_SHARE = 0.9  # of a row's product: a segment that carries this is named instead of the row
_LOUD_SHARE = 0.5  # of a row's product: if few loud tokens carry this, they are named one by one
_FEW = 3  # the most tokens of a row that are few
ELEVATED = 3.0  # times the typical coefficient of the batch: the loss weighs such a token more than others
_ALIKE = 10.0  # times its row's median coefficient: a loud token above that stands for itself, not for its row
_MOST = 0.8  # of a row's tokens: if this many are elevated, the row is the culprit
_HOT = 0.4  # of a culprit's norm, so a tenth of the threshold: the least of each token in a segment


class Row:
    """One row's tokens: how much each carries, and how much the loss weighs it.

    Args:
        values: signed lower bounds on the norm of each token's gradient, (n,).
        errors: how far each may be off by chance, (n,).
        weights: |c_t| + |e_t|, (n,).
        typical: a typical token's weight in the batch.
        least: the least norm of a culprit.
    """

    def __init__(self, values: torch.Tensor, errors: torch.Tensor, weights: torch.Tensor, typical: float, least: float):
        self.values, self.errors, self.weights, self.typical, self.least = values, errors, weights, typical, least
        self.sizes = shrunk(values, errors).abs()
        self.loud = (self.sizes >= least).nonzero().squeeze(-1).tolist()
        self.total = self.bound(0, len(values))

    def bound(self, start: int, end: int) -> float:
        """Lower bound on the norm of a run of tokens. Independent errors add up as a root."""
        return self._bound(self.values[start:end], self.errors[start:end])

    def _bound(self, values: torch.Tensor, errors: torch.Tensor) -> float:
        return float(shrunk(values.sum(), torch.linalg.vector_norm(errors)).abs())

    def spans(self, stands_out: bool) -> list[tuple[int, int]]:
        """Intervals [start, end) worth naming.

        In this order: the whole row, if the loss weighs all of it more; its loud tokens, if they are few; segments and
        loud tokens between them; else, if the row ``stands_out`` by carrying far more than a typical one, the shortest
        run that carries most of it.
        """
        if self._is_sequence():
            return [(0, len(self.values))]
        tokens = [(number, number + 1) for number in self.loud]
        carried, whole = (float(values.sum().abs()) for values in (self.values[self.loud], self.values))
        if len(self.loud) <= _FEW and (self.total < self.least or carried >= _LOUD_SHARE * whole):
            return tokens
        runs = [(start, end) for start, end in self._runs() if self.bound(start, end) >= self.least or end - start == 1]
        covered = {number for start, end in runs for number in range(start, end)}
        found = sorted(runs + [token for token in tokens if token[0] not in covered])
        found = [(start, end) for start, end in found if end - start > 1 or start in self.loud]
        if not found and stands_out and self.total >= self.least:
            return [window(self.values)]
        return found

    def _is_sequence(self) -> bool:
        """Whether the row is off as a whole: nearly all its tokens weigh more than typical and about alike, and even
        without its three loudest it is a culprit."""
        matters = self.weights > 0
        elevated = self.weights >= ELEVATED * self.typical
        if not self.typical or len(self.values) <= _FEW or elevated.sum() < _MOST * matters.sum():
            return False
        if self.loud and float(self.weights[self.loud].max()) > _ALIKE * median(self.weights):
            return False
        quiet = torch.ones_like(matters)
        quiet[self.values.abs().topk(_FEW).indices] = False
        return self._bound(self.values[quiet], self.errors[quiet]) >= self.least

    def _runs(self) -> Iterator[tuple[int, int]]:
        """The longest runs [start, end) of tokens none of which is small, with both ends large beyond chance.

        A token that may be large but for noise belongs to the run if both its neighbours are large.
        """
        least, sizes = _HOT * self.least, self.values.abs()
        certain, hot = (self.sizes >= least).tolist(), sizes >= least
        hot[1:-1] |= (sizes + self.errors >= least)[1:-1] & hot[:-2] & hot[2:]
        run: list[int] = []
        for number, is_hot in enumerate([*hot.tolist(), False]):
            if is_hot:
                run.append(number)
                continue
            kept = [at for at in run if certain[at]]
            if kept:
                yield kept[0], kept[-1] + 1
            run = []


def widened(start: int, end: int, hinted: list[bool]) -> tuple[int, int]:
    """A run of at least two tokens, extended over hinted tokens right before and after it."""
    if end - start > 1:
        while start > 0 and hinted[start - 1]:
            start -= 1
        while end < len(hinted) and hinted[end]:
            end += 1
    return start, end


def median(values: torch.Tensor) -> float:
    """Median of what is not 0; 0 if all is."""
    kept = values[values != 0]
    return float(kept.median()) if len(kept) else 0.0


def window(values: torch.Tensor) -> tuple[int, int]:
    """The shortest run [start, end) that carries 0.9 of the sum; the whole row if that takes more than half of it."""
    target = _WINDOW_SHARE * float(values.sum().abs())
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    sums = sums if sums[-1] >= 0 else -sums
    for length in range(1, len(values) // 2 + 1):
        carried = sums[length:] - sums[:-length]
        if float(carried.max()) >= target:
            start = int(carried.argmax())
            return start, start + length
    return 0, len(values)
