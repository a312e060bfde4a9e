# SPDX-License-Identifier: Apache-2.0
"""Propose the spans of tokens that may be culprits, by shares and coefficients.

Each rank looks at its own tokens. Then all ranks' candidates are merged, so that every rank goes on with the same list.
Only a few numbers per candidate travel, and no more than some dozens of candidates per rank.

Shapes: B rows of a micro-batch, T response positions, n response tokens of one row.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..core.step import typical_sizes
from ..core.tracker import median_size
from ..trigger.history import UNUSUAL, excess
from .share import ShareMap, shrunk
from .task import CULPRIT_SHARE, Span, Task

MAX_MISSES = 2
"""Backwards that may prove nothing: of tokens that no share names, and of candidates in a row, since those behind them
are quieter still."""
_MAX_SENT = 64  # candidates per rank; four times as many are kept, as host work must not grow with the ranks' square
_NEARLY_ALL = 0.9  # of what a row carries, or of its tokens
FEW = 3
"""Culprits that are looked at one by one: if so few tokens carry a row it is they and not the row, and the norms of so
few are measured though their bounds name them."""
_USUAL = 0.6  # of the rows pull less than the usual one: two fifths may be culprits
TINY = 1e-300  # instead of a weight, or a usual square, of 0

_Found = tuple[float, int, int, int, str, float]
"""(size by which candidates are ordered, micro-batch, first token, end, kind of span, bound): cheap to send."""


def propose(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Return spans whose share makes them culprits, loudest first; then tokens that a backward has to prove: those with
    the largest coefficients and, where there is no span, the loudest."""
    is_read = math.isfinite(shares.closure)
    found = find_by_share(task, shares, named) if is_read else []
    if not found and shares.is_exact:
        similar = find_similar(task, shares, named)
        found = similar if sum_products(task, shares, similar) > shares.square / 2 else []
    left = shares.square - sum_products(task, shares, found) if shares.is_trusted else math.inf
    # tokens that cancel each other are left where the spans account for the spike: such a hint must make one by itself
    is_open = not abs(left) < task.reference**2
    least = task.culprit_norm if is_open else task.reference
    hints = find_by_coefficient(task, MAX_MISSES, [*named, *found], least)
    if found and is_open and shares.is_trusted:
        hints = _confirm(task, shares, [*named, *found], hints, left)
    if found or not is_read:
        return found + hints
    sizes = [part.abs() for part in shares.products]
    return hints + find_by_value(task, sizes.__getitem__, 0.0, [*named, *hints])[: task.max_culprits]


def find_by_share(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Return spans with at least a culprit's norm, by Cauchy-Schwarz and after subtracting the noise, loudest first.

    :func:`spans_in` decides what of a row is a span. Tokens that are ``named`` already read 0.
    """
    norm, strong = shares.square**0.5, UNUSUAL * find_usual_pull(task).pull
    carried_by_row = _over_rows(
        task, lambda: [float(values.sum().abs()) for _, _, (values,) in rows_of(task, shares.products.__getitem__)]
    )
    typical = carried_by_row[len(carried_by_row) // 2] / norm if carried_by_row else 0.0

    def local() -> list[_Found]:
        found = []
        values = shares.products.__getitem__, shares.doubt, compute_pulls(task).__getitem__
        for index, first, (products, doubts, pulls) in rows_of(task, *values):
            pulled = pulls[pulls > 0]
            is_strong = strong > 0 and _is_pulled(pulled, strong)
            is_alike = _is_pulled(pulled, 0.0)
            usual = UNUSUAL * float(pulled.median()) if len(pulled) and strong > 0 else math.inf
            least = task.culprit_norm, max(task.culprit_norm, UNUSUAL * typical)
            for start, end in spans_in(
                products / norm, doubts / norm, is_strong, *least, is_alike, pulls, max(strong, usual)
            ):
                bound = _bound(products[start:end] / norm, doubts[start:end] / norm)
                found.append(_found(bound, index, first + start, first + end, len(products), bound))
        return found

    return [replace(span, threshold=task.culprit_norm) for span in _merge(task, local, named)]


def _is_pulled(pulls: torch.Tensor, least: float) -> bool:
    """Return whether the loss pulls a row's typical token at least this much, and nearly all of its tokens alike: none
    far more, beyond chance, and few far less."""
    if not len(pulls):
        return False
    middle = float(pulls.median())
    chance = UNUSUAL * math.sqrt(2 * math.log(max(len(pulls), 2)))
    num_alike = int((pulls >= middle / chance).sum())
    return middle >= least and num_alike >= _NEARLY_ALL * len(pulls) and float(pulls.max()) <= chance * middle


def find_similar(task: Task, shares: ShareMap, named: Sequence[Span]) -> list[Span]:
    """Return tokens that are culprits if gradients are orthogonal: then ||g||^2 = <g, R>. The bound of each of n equal
    tokens is 1 / sqrt(n) of its norm."""
    least, per_norm = task.culprit_norm**2, shares.square**-0.5
    found = find_by_value(task, shares.products.__getitem__, least, named, per_norm)
    return [replace(token, threshold=least * per_norm) for token in found]


def _confirm(task: Task, shares: ShareMap, named: Sequence[Span], hints: Sequence[Span], left: float) -> list[Span]:
    """Return the hints; those that carry most of ``left``, the part of ||R||^2 that is not ``named``'s, need no
    backward if their shares prove half of a culprit's norm."""
    norm, least = shares.square**0.5, task.culprit_norm / 2
    bounds = [shrunk(products.abs(), shares.doubt(index)) / norm for index, products in enumerate(shares.products)]
    loud = find_by_value(task, bounds.__getitem__, least, named, 1.0) if hints else []
    places = {(hint.micro_batch, hint.rank, hint.start) for hint in hints}
    proved = [token for token in loud if (token.micro_batch, token.rank, token.start) in places]
    if not sum_products(task, shares, proved) > left / 2:
        return list(hints)
    return [replace(token, threshold=least) for token in proved] + drop_overlapping(proved, hints)


def sum_products(task: Task, shares: ShareMap, spans: Sequence[Span]) -> float:
    """Return <sum of these spans' gradients, R>, over all ranks."""
    ranks, mask = task.prober.ranks, task.prober.step.token_mask

    def local() -> list[float]:
        own = [span for span in spans if span.rank == ranks.rank]
        parts = [shares.products[span.micro_batch][mask(span.micro_batch)][span.start : span.end] for span in own]
        return [math.fsum(float(part.sum()) for part in parts)]

    return ranks.sum(ranks.run_local_synced(local))[0]


def compute_pulls(task: Task, with_entropy: bool = True) -> list[torch.Tensor]:
    """Return how much the loss pulls each token of this rank: |c_t| + |e_t|, or |c_t| alone, over the token's weight in
    the loss, float64 (B, T) of each micro-batch."""
    found = []
    for index, readout in enumerate(task.readouts(())):
        sizes = readout.weight if with_entropy else readout.log_prob_weight
        weights = task.prober.step.token_weights(index).abs().double()
        found.append(torch.where(weights > 0, sizes / weights.clamp(min=TINY), 0.0))
    return found


class UsualPull(NamedTuple):
    """How much the loss usually pulls a row's typical token, and whether the batch as a whole is above that."""

    pull: float
    most: float
    """How large ``pull`` may be by chance, since rows are few: two standard errors of its rank further up."""
    is_scaled: bool


def find_usual_pull(task: Task) -> UsualPull:
    """Return the median pull of a row that two fifths of all ranks' rows surpass: if more are off, the batch is.

    Where the run has a history, unusual rows are left out, unless more than three fifths are: then the batch is scaled.
    A row is unusual if its coefficient is in this run, or if the entropy makes most of its pull, and that is unusual
    for a log-prob's loss. Without a history, or an unusual row, the batch is scaled where the pull is.
    """
    usual, step = task.usual_coefficient, task.prober.step

    def local() -> list[tuple[float, bool]]:
        pulls = compute_pulls(task)
        if usual is None:
            return [(median_size([row]), False) for _, _, (row,) in rows_of(task, pulls.__getitem__)]
        without, found = compute_pulls(task, with_entropy=False), []
        values = pulls.__getitem__, without.__getitem__, lambda index: typical_sizes(step, index)
        for _, _, row in rows_of(task, *values):
            pull, by_log_prob, size = (median_size([each]) for each in row)
            # the history's coefficients are by log-probs, so it cannot show that the entropy pulls too much
            by_entropy = pull > UNUSUAL * max(by_log_prob, 1 / task.unit)
            found.append((pull, by_entropy or excess(size, usual) is not None))
        return found

    gathered = task.prober.ranks.gather(task.prober.ranks.run_local_synced(local))
    rows = [row for part in gathered for row in part if row[0] > 0]
    ordinary = sorted(pull for pull, is_unusual in rows if not is_unusual)
    is_telling = len(ordinary) < len(rows)
    has_ordinary = is_telling and len(ordinary) >= (1 - _USUAL) * len(rows)
    known = (ordinary if has_ordinary else sorted(pull for pull, _ in rows)) or [0.0]
    place = _USUAL * len(known)
    further = place + 2 * math.sqrt(place * (1 - _USUAL))
    pull = known[int(place)]
    is_scaled = not has_ordinary if is_telling else pull * task.unit > UNUSUAL
    return UsualPull(pull, known[min(math.ceil(further), len(known) - 1)], is_scaled)


def _over_rows(task: Task, local: Callable[[], list[float]]) -> list[float]:
    """Gather a number of each row of all ranks, and return those over 0, rising."""
    ranks = task.prober.ranks
    return sorted(number for part in ranks.gather(ranks.run_local_synced(local)) for number in part if number > 0)


def drop_overlapping(known: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return those of the spans that share no token with any known one."""
    held = _Held(known)
    return [span for span in spans if not held.parts(span)]


class _Held:
    """The tokens of some spans, without a list of them."""

    def __init__(self, spans: Sequence[Span]):
        self._at: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            self._at.setdefault((span.micro_batch, span.rank), []).append(span)

    def overlapping(self, span: Span) -> list[Span]:
        """Return the held spans that share a token with this one."""
        there = self._at.get((span.micro_batch, span.rank), ())
        return [each for each in there if each.start < span.end and span.start < each.end]

    def parts(self, span: Span) -> int:
        """Return how many of a span's tokens are held, at most; 0 if none is."""
        return sum(min(each.end, span.end) - max(each.start, span.start) for each in self.overlapping(span))


def find_by_value(
    task: Task, value: Callable[[int], torch.Tensor], least: float, named: Sequence[Span], bound: float = 0.0
) -> list[Span]:
    """Return tokens whose ``value``, (B, T) of a micro-batch, is at least ``least``, largest first, without ``named``.

    A value times ``bound`` is a lower bound on the token's norm; 0 makes hints.
    """
    most = max(_MAX_SENT, 2 * task.max_culprits) + sum(span.size for span in named)
    return _merge(task, lambda: _largest(task, value, most, least, bound), named)


def _largest(
    task: Task, value: Callable[[int], torch.Tensor], most: int, least: float = 0.0, bound: float = 0.0
) -> list[_Found]:
    """Return this rank's tokens with the largest values, at most ``most`` of each micro-batch."""
    found = []
    for index in range(task.prober.step.num_micro_batches):
        values = value(index)[task.prober.step.token_mask(index)]
        top = values.topk(min(most, len(values)))
        for size, number in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if size >= least:
                found.append(_found(size, index, number, number + 1, 0, bound * size))
    return found


def find_by_coefficient(task: Task, most: int, named: Sequence[Span], least: float) -> list[Span]:
    """Return hints: at most ``most`` tokens whose coefficients would make them culprits if their log-prob gradients
    were typical ones, without those ``named``. ``least`` is the threshold that a backward has to show them over.

    |c_t| (1 - p_t) is taken for a token's norm (arXiv 2505.12929). If tokens are independent noise, a set's norm goes
    with the root of its sum of squares. A culprit has a quarter of the norm or more, hence a sixteenth of the sum of
    squares of those no louder. And at the norm per coefficient of those ``named`` it would be over ``least``.
    This needs no forward, and shows pairs that cancel in the gradient.
    """
    prober, mask = task.prober, task.prober.step.token_mask

    def local() -> tuple[list[torch.Tensor], float]:
        sizes = [readout.slope.abs() for readout in task.readouts([])]
        return sizes, sum(float(size[mask(index)].square().sum()) for index, size in enumerate(sizes))

    sizes, square = prober.ranks.run_local_synced(local)
    (rest,) = prober.ranks.sum([square])
    count = most + sum(span.size for span in named)
    kept: list[Span] = []
    held, norm_per_size = _Held(named), 0.0
    for size, candidate in _merge_sized(task, lambda: _largest(task, sizes.__getitem__, count)):
        rest -= size**2  # loudest first, so the rest is that of tokens no louder
        known = [span for span in held.overlapping(candidate) if math.isfinite(span.norm)]
        norm_per_size = max([norm_per_size, *(span.norm / span.size**0.5 / size for span in known)])
        if not held.parts(candidate):
            is_quiet = norm_per_size and norm_per_size * size < least
            if is_quiet or (size / CULPRIT_SHARE) ** 2 < rest or len(kept) == most:
                break
            kept.append(replace(candidate, threshold=least))
    return kept


def find_non_finite(task: Task) -> list[Span]:
    """Return spans whose coefficients are NaN or inf; takes no forward.

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
    """Yield (micro_batch, index of the row's first token, its values at response tokens), without empty rows."""
    for index in range(task.prober.step.num_micro_batches):
        first = 0
        for mask, *rows in zip(task.prober.step.token_mask(index), *(value(index) for value in values), strict=True):
            if mask.any():
                yield index, first, [row[mask] for row in rows]
            first += int(mask.sum())


def _found(size: float, index: int, start: int, end: int, length: int, bound: float = 0.0) -> _Found:
    """Make a candidate of this rank, in a row of ``length`` tokens."""
    span = "token" if end - start == 1 else "sequence" if end - start == length else "segment"
    return size, index, start, end, span, bound


def _merge(task: Task, local: Callable[[], list[_Found]], named: Sequence[Span]) -> list[Span]:
    """Merge all ranks' candidates, largest first, without those that are named already as a whole."""
    held = _Held(named)
    return [candidate for _, candidate in _merge_sized(task, local) if held.parts(candidate) < candidate.size]


def _merge_sized(task: Task, local: Callable[[], list[_Found]]) -> list[tuple[float, Span]]:
    """Merge the largest candidates of all ranks, the same on every rank: at most four times what a rank sends."""
    ranks, most = task.prober.ranks, max(_MAX_SENT, 2 * task.max_culprits)

    def largest() -> list[_Found]:
        return heapq.nsmallest(most, local(), key=_order)

    gathered = ranks.gather(ranks.run_local_synced(largest))
    sent = ((rank, found) for rank, part in enumerate(gathered) for found in part)
    kept = heapq.nsmallest(4 * most, sent, key=lambda item: (*_order(item[1])[:2], item[0], item[1][2]))
    return [(size, Span(bound, span, index, rank, start, end)) for rank, (size, index, start, end, span, bound) in kept]


def _order(found: _Found) -> tuple:
    return -found[0], found[1], found[2]


# ---- which spans of one row: pure arithmetic


def spans_in(
    values: torch.Tensor,
    errors: torch.Tensor,
    is_strong: bool,
    least: float,
    least_run: float,
    is_alike: bool = False,
    pulls: torch.Tensor | None = None,
    unusual: float = math.inf,
) -> list[tuple[int, int]]:
    """Return the intervals [start, end) of one row's tokens that are worth naming.

    Its loud tokens, together with neighbours that are loud or pulled as much; or, where none is loud, the shortest run
    that carries nearly all, without the gap between two tokens that do. The whole row, if the loss pulls nearly all of
    it more and it is a culprit without its loudest few, or pulls it alike and the rest without its loud tokens would be
    named.

    Args:
        values: signed lower bounds on the norm of each token's gradient, 0 if it is named already, (n,).
        errors: how far each may be off by chance, (n,).
        is_strong: whether the loss pulls nearly all of the row more than usual.
        least: the least norm of a culprit.
        least_run: the least norm of a run without a loud token; more, where every row carries much.
        is_alike: whether the loss pulls all of the row alike, as of a damaged document.
        pulls: how much the loss pulls each token, (n,).
        unusual: the least pull that is unusual.
    """
    is_loud = shrunk(values, errors).abs() >= least
    quiet, has_loud = torch.ones(len(values), dtype=torch.bool), bool(is_loud.any())
    quiet[values.abs().topk(min(FEW, len(values))).indices] = False
    if is_strong and _bound(values[quiet], errors[quiet]) >= least:
        return [(0, len(values))]
    if is_alike and has_loud and _bound(values[~is_loud], errors[~is_loud]) >= least_run:
        return [(0, len(values))]
    found = []
    is_like = is_loud
    if pulls is not None and has_loud:
        is_like = is_loud | (pulls >= max(unusual, float(pulls[is_loud].median()) / UNUSUAL)) & (values != 0)
    for first, last in _runs(is_like.tolist()):
        loud = [number for number in range(first, last) if is_loud[number]]
        adds_up = bool(loud) and _bound(values[first:last], errors[first:last]) >= least  # else they cancel
        found += [(first, last)] if adds_up else [(number, number + 1) for number in loud]
    start, end = (0, 0) if has_loud else _window(values)
    if not has_loud and _bound(values[start:end], errors[start:end]) >= least_run:
        return [(start + first, start + last) for first, last in _carriers(values[start:end])]
    return found


def _bound(values: torch.Tensor, errors: torch.Tensor) -> float:
    """Return a lower bound on the norm of some tokens' gradient. Independent errors add up as a root."""
    return float(shrunk(values.sum(), torch.linalg.vector_norm(errors)).abs())


def _runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the longest runs [start, end) of flags that are set."""
    end = 0
    for is_set, group in itertools.groupby(flags):
        start, end = end, end + len(list(group))
        if is_set:
            yield start, end


def _window(values: torch.Tensor) -> tuple[int, int]:
    """Return the shortest run [start, end) that carries nearly all of the sum; the whole row if it takes over half."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)]).mul(values.sum().sign())
    enough, starts, length = _NEARLY_ALL * float(sums[-1]), deque[tuple[int, float]](), len(values) // 2 + 1
    for end, total in enumerate(sums.tolist()):
        while starts and total - starts[0][1] >= enough:
            length = min(length, end - starts.popleft()[0])
        while starts and starts[-1][1] >= total:  # a later start of no larger sum makes every run shorter
            starts.pop()
        starts.append((end, total))
    if length > len(values) // 2:
        return 0, len(values)
    start = int((sums[length:] - sums[:-length]).argmax())
    return start, start + length


def _carriers(values: torch.Tensor) -> list[tuple[int, int]]:
    """Return the one or two tokens that carry nearly all of a run's sum; the whole run where it takes more. What no
    share proves takes a backward of its own."""
    sizes = values * values.sum().sign()
    top = sizes.topk(min(2, len(sizes)))
    enough = (top.values.cumsum(0) >= _NEARLY_ALL * sizes.sum()).nonzero().flatten().tolist()
    if not enough:
        return [(0, len(values))]
    is_carrier = torch.zeros(len(values), dtype=torch.bool)
    is_carrier[top.indices[: enough[0] + 1]] = True
    return [*_runs(is_carrier.tolist())]
