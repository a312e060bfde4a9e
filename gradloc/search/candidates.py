# SPDX-License-Identifier: Apache-2.0
"""Which spans of tokens may be culprits, by shares, coefficients and the sketch.

Each rank looks at its own tokens. Then all ranks' candidates are merged, so that every rank goes on with the same list.
Only a few numbers per candidate travel, and no more than some dozens of candidates per rank.

Shapes: B rows of a micro-batch, T response positions, n response tokens of one row.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..core.tracker import median_size
from .share import ShareMap, shrunk
from .task import Span, Task

_MAX_HINTS = 2  # tokens that are verified though no share names them
MUCH = 0.5  # of R: what carries less leaves most of it to others
_MAX_SENT = 64  # candidates per rank
_MAX_KEPT = 256  # candidates of all ranks: host work must not grow with the square of the ranks
_WINDOW_SHARE = 0.9  # of a row's product: a segment that carries this is named instead of the row
_LOUD_SHARE = 0.5  # of a row's product: if few loud tokens carry this, they are named one by one
_FEW = 3  # the most tokens of a row that are few
ELEVATED = 3.0  # times the typical coefficient of the batch: the loss weighs such a token more than others
_ALIKE = 10.0  # times its row's median coefficient: a loud token above that stands for itself, not for its row
_MOST = 0.8  # of a row's tokens: if more are elevated, the row is the culprit
_HOT = 0.4  # of a culprit's norm, so a tenth of the threshold: the least of each token in a segment


_Found = tuple[float, int, int, int, str, float]
"""(size by which candidates are ordered, micro-batch, first token, end, kind of span, bound): cheap to send."""


def proposed(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Spans whose share makes them culprits, loudest first; then tokens that a backward of their own has to prove.

    These have the largest coefficients; where there is no span, also the loudest.
    """
    is_read = math.isfinite(shares.closure)
    found = by_share(task, shares, named) if is_read else []
    if not found and shares.is_exact:
        similar = alike(task, shares, named)
        found = similar if carried(task, shares, similar) > MUCH * shares.square else []
    hints = by_coefficient(task, _MAX_HINTS, [*named, *found])
    if found or not is_read:
        return found + hints
    sizes = [part.abs() for part in shares.products]
    return hints + by_value(task, sizes.__getitem__, 0.0, [*named, *hints])[: task.max_culprits]


def by_share(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Spans with at least a culprit's norm, by Cauchy-Schwarz and after taking off the noise, loudest first.

    :class:`Row` decides what of a row is a span: a few loud tokens, a segment (a run of large tokens), or the whole
    sequence. Tokens that are ``named`` already read 0.
    """
    norm = shares.square**0.5
    typical_weight, typical_total = _typical(task, shares, named)

    def local() -> list[_Found]:
        found = []
        weights = [readout.weight for readout in task.readouts(named)]
        for index, first, (products, doubt, weight) in rows_of(
            task, shares.products.__getitem__, shares.doubt, weights.__getitem__
        ):
            row = Row(products / norm, doubt / norm, weight, typical_weight, task.culprit_norm)
            for start, end in row.spans(stands_out=row.total >= ELEVATED * typical_total / norm):
                bound = row.bound(start, end)
                found.append(_found(bound, index, first + start, first + end, len(products), bound))
        return found

    return [replace(span, threshold=task.culprit_norm) for span in _merge(task, local, named)]


def alike(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Tokens that are culprits if gradients are orthogonal: then ||g||^2 = <g, R>. Of n that are alike each has a bound
    of 1 / sqrt(n) of its norm."""
    least, per_norm = task.culprit_norm**2, shares.square**-0.5
    found = by_value(task, shares.products.__getitem__, least, named, per_norm)
    return [replace(token, threshold=least * per_norm) for token in found]


def carried(task: Task, shares: ShareMap, spans: Sequence[Span]) -> float:
    """Return <sum of these spans' gradients, R>, over all ranks."""
    ranks, mask = task.prober.ranks, task.prober.step.token_mask

    def local() -> list[float]:
        own = [span for span in spans if span.rank == ranks.rank]
        parts = [shares.products[span.micro_batch][mask(span.micro_batch)][span.start : span.end] for span in own]
        return [math.fsum(float(part.sum()) for part in parts)]

    return ranks.sum(ranks.agree(local))[0]


def _typical(task: Task, shares: ShareMap, named: Sequence[Span]) -> tuple[float, float]:
    """Medians over all ranks' rows: of a row's median coefficient, and of its absolute product with R."""

    def local() -> list[tuple[float, float]]:
        weights = [readout.weight for readout in task.readouts(named)]
        rows = rows_of(task, shares.products.__getitem__, weights.__getitem__)
        return [(median_size([weight]), float(products.sum().abs())) for _, _, (products, weight) in rows]

    ranks = task.prober.ranks
    pairs = [pair for part in ranks.gather(ranks.agree(local)) for pair in part]
    medians = torch.tensor([[weight, total] for weight, total in pairs if weight > 0], dtype=torch.float64)
    return tuple(medians.median(0).values.tolist()) if len(medians) else (0.0, 0.0)


def apart(known: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return those of the spans that share no token with any known one."""
    held = _Held(known)
    return [span for span in spans if not held.parts(span)]


class _Held:
    """Which tokens some spans hold, without a list of the tokens."""

    def __init__(self, spans: Sequence[Span]):
        self._at: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            self._at.setdefault((span.micro_batch, span.rank), []).append(span)

    def parts(self, span: Span) -> int:
        """Return how many of a span's tokens are held, at most; 0 if none is."""
        there = self._at.get((span.micro_batch, span.rank), ())
        return sum(max(min(each.end, span.end) - max(each.start, span.start), 0) for each in there)


def by_value(
    task: Task, value: Callable[[int], torch.Tensor], least: float, named: Sequence[Span], bound: float = 0.0
) -> list[Span]:
    """Tokens whose ``value``, (B, T) of a micro-batch, is at least ``least``, largest first, without those ``named``.

    A value times ``bound`` is a lower bound on the token's norm; 0 makes hints.
    """
    most = max(_MAX_SENT, 2 * task.max_culprits) + sum(span.size for span in named)

    def local() -> list[_Found]:
        found = []
        for index in range(task.prober.step.num_micro_batches):
            values = value(index)[task.prober.step.token_mask(index)]
            top = values.topk(min(most, len(values)))
            for size, number in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if size >= least:
                    found.append(_found(size, index, number, number + 1, 0, bound * size))
        return found

    return _merge(task, local, named)


def by_coefficient(task: Task, most: int, named: Sequence[Span], norm: float = math.inf) -> list[Span]:
    """Hints: tokens whose coefficient would make them culprits if their log-prob gradients were typical ones.

    |c_t| (1 - p_t) stands for a token's norm (arXiv 2505.12929). If tokens are independent noise, a set's norm goes
    with the root of its sum of squares. A culprit has a quarter of the norm or more, hence a sixteenth of the sum of
    squares of those no louder. Needs no forward, and sees pairs that cancel in the gradient.

    Args:
        most: how many are wanted, without those ``named``.
        norm: ||R||. If it were dealt out to all tokens by |c_t| (1 - p_t), each hint would have a culprit's norm. By
            default that asks nothing.
    """
    prober = task.prober
    square = 0.0

    def local() -> list[_Found]:
        nonlocal square
        found = []
        for index, readout in enumerate(task.readouts([])):
            values = readout.slope.abs()[prober.step.token_mask(index)]
            square += float(values.square().sum())
            top = values.topk(min(most + sum(span.size for span in named), len(values)))
            for size, number in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                found.append(_found(size, index, number, number + 1, 0))
        return found

    merged = _merge_sized(task, local)
    (rest,) = prober.ranks.sum([square])
    least = rest * (task.culprit_norm / norm) ** 2
    kept: list[Span] = []
    held = _Held(named)
    for size, candidate in merged:  # loudest first, so the rest is that of tokens no louder
        rest -= size**2
        if not held.parts(candidate):
            if 16 * size**2 < rest or size**2 < least or len(kept) == most:
                break
            kept.append(candidate)
    return kept


def non_finite(task: Task) -> list[Span]:
    """Spans whose coefficients are NaN or inf; takes no forward.

    If a row's log-probs are not finite, one span reaches from the first to the last of them: attention passes a NaN on
    to all later tokens. If only its loss is not, each token is a span, unless all of the row's tokens are.
    """

    def local() -> list[_Found]:
        step, found = task.prober.step, []
        rows = rows_of(task, lambda index: step.coefficients(index)[0], lambda index: step.recorded(index).log_prob)
        for index, first, (values, log_prob) in rows:
            bad = (~torch.isfinite(values)).nonzero().squeeze(-1).tolist()
            broken = (~torch.isfinite(log_prob)).nonzero().squeeze(-1).tolist()
            spans = [(broken[0], broken[-1] + 1)] if broken else []
            if not broken and len(bad) == len(values) and len(bad) > 1:
                spans = [(0, len(values))]
            covered = {number for start, end in spans for number in range(start, end)}
            for start, end in spans + [(number, number + 1) for number in bad if number not in covered]:
                found.append(_found(1.0, index, first + start, first + end, len(values)))
        return found

    return _merge(task, local, ())


def rows_of(task: Task, *values: Callable[[int], torch.Tensor]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """(micro_batch, index of the row's first token, its values at response tokens), without empty rows."""
    for index in range(task.prober.step.num_micro_batches):
        first = 0
        for mask, *rows in zip(task.prober.step.token_mask(index), *(value(index) for value in values), strict=True):
            if mask.any():
                yield index, first, [row[mask] for row in rows]
            first += int(mask.sum())


def _found(size: float, index: int, start: int, end: int, length: int, bound: float = 0.0) -> _Found:
    """A candidate of this rank, in a row of this many tokens."""
    span = "token" if end - start == 1 else "sequence" if end - start == length else "segment"
    return size, index, start, end, span, bound


def _merge(task: Task, local: Callable[[], list[_Found]], named: Sequence[Span]) -> list[Span]:
    """All ranks' candidates, largest first, without those that are named already as a whole."""
    held = _Held(named)
    return [candidate for _, candidate in _merge_sized(task, local) if held.parts(candidate) < candidate.size]


def _merge_sized(task: Task, local: Callable[[], list[_Found]]) -> list[tuple[float, Span]]:
    """The largest candidates of all ranks, the same on every rank: at most ``_MAX_KEPT``."""
    ranks, most = task.prober.ranks, max(_MAX_SENT, 2 * task.max_culprits)

    def largest() -> list[_Found]:
        return heapq.nsmallest(most, local(), key=_order)

    gathered = ranks.gather(ranks.agree(largest))
    sent = ((rank, found) for rank, part in enumerate(gathered) for found in part)
    kept = heapq.nsmallest(max(_MAX_KEPT, most), sent, key=lambda item: (*_order(item[1])[:2], item[0], item[1][2]))
    return [(size, Span(bound, span, index, rank, start, end)) for rank, (size, index, start, end, span, bound) in kept]


def _order(found: _Found) -> tuple:
    return -found[0], found[1], found[2]


# ---- which spans of one row: pure arithmetic


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
        runs = [(start, end) for start, end in self._runs() if end - start > 1 and self.bound(start, end) >= self.least]
        covered = {number for start, end in runs for number in range(start, end)}
        found = sorted(runs + [token for token in tokens if token[0] not in covered])
        if not found and stands_out and self.total >= self.least:
            return [window(self.values)]
        return found

    def _is_sequence(self) -> bool:
        """Whether the row is off as a whole: nearly all its tokens weigh more than typical and about alike, and most
        of them are loud, or even without its three loudest it is a culprit."""
        matters = self.weights > 0
        elevated = self.weights >= ELEVATED * self.typical
        if not self.typical or len(self.values) <= _FEW or elevated.sum() <= _MOST * matters.sum():
            return False
        if self.loud and float(self.weights[self.loud].max()) > _ALIKE * median_size([self.weights]):
            return False
        if _FEW < matters.sum() < 2 * len(self.loud) and self.total >= self.least:
            return True
        quiet = torch.ones_like(matters)
        quiet[self.values.abs().topk(_FEW).indices] = False
        return self._bound(self.values[quiet], self.errors[quiet]) >= self.least

    def _runs(self) -> Iterator[tuple[int, int]]:
        """The longest runs [start, end) of tokens none of which is small."""
        start = None
        for number, is_hot in enumerate([*(self.sizes >= _HOT * self.least).tolist(), False]):
            if is_hot:
                start = number if start is None else start
            elif start is not None:
                yield start, number
                start = None


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
