# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Which spans of tokens may be culprits: read off shares, coefficients and the sketch. Local numbers, gathered once.

Every function here looks at this rank's tokens, then all ranks' candidates are merged, so that every rank goes on
with the same list.

Shapes: B rows of a micro-batch, T response positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..core.selection import Token
from .share import ShareMap
from .task import Task

__all__ = ["Candidate", "by_coefficient", "by_share", "by_value", "non_finite"]

_WINDOW_SHARE = 0.9  # of a sequence's product, that a segment must carry to be named instead of the sequence
_LOUD_SHARE = 0.5  # of a row's product, that its loud tokens must carry to be named one by one
_FEW = 3  # this many may always be


@dataclass(frozen=True)
class Candidate:
    """A span of one rank's micro-batch."""

    bound: float
    """Lower bound on its norm; 0 for a mere hint, which has to be verified."""
    span: str
    """``token``, ``segment`` or ``sequence``."""
    tokens: tuple[Token, ...]


def by_share(task: Task, shares: ShareMap, named: set[Token]) -> list[Candidate]:
    """Spans whose norm is, by Cauchy-Schwarz, at least a culprit's; each row is judged as a whole first.

    A row whose tokens together are a culprit is named by its few tokens when these carry it, else by the segment that
    does, else as a sequence: a spread spike is not its loudest token.
    """
    norm = shares.square**0.5

    def local() -> list[tuple[float, Candidate]]:
        found = []
        for index, first, values in _rows(task, lambda index: shares.products[index] / norm):
            for start, end in _spans(values, task.culprit_norm):
                span = "token" if end - start == 1 else "sequence" if end - start == len(values) else "segment"
                bound = float(values[start:end].sum().abs())
                found.append((bound, _span(task, index, first + start, first + end, span, bound)))
        return found

    return _merge(task, local, named)


def by_value(task: Task, value: Callable[[int], torch.Tensor], least: float, named: set[Token]) -> list[Candidate]:
    """Tokens for which a per-token value (B, T) of their micro-batch is at least ``least``, largest first: hints."""

    def local() -> list[tuple[float, Candidate]]:
        found = []
        for index in range(task.prober.step.num_micro_batches):
            values = value(index)[task.prober.step.token_mask(index)]
            for number in (values >= least).nonzero().squeeze(-1).tolist():
                found.append((float(values[number]), _token(task, index, number, 0.0)))
        return found

    return _merge(task, local, named)


def by_coefficient(task: Task, most: int, named: set[Token]) -> list[Candidate]:
    """Tokens whose coefficient alone would make them culprits, were their log-prob gradient a typical one: hints.

    |c_t| (1 - pi_t) stands for a token's norm (arXiv 2505.12929). With all tokens as independent noise, a part's norm
    goes with the root of its sum of squares; a culprit carries a quarter of the norm or more, so a sixteenth of the
    sum of squares of all the others. Needs no forward, and sees pairs that cancel in the gradient.
    """
    prober = task.prober
    square = 0.0

    def proxies(index: int) -> torch.Tensor:
        prob = prober.step.recorded(index).log_prob.double().exp().clamp(max=1.0)
        return prober.step.coefficients(index)[0].double().abs() * (1 - prob)

    def local() -> list[tuple[float, Candidate]]:
        nonlocal square
        found = []
        for index in range(prober.step.num_micro_batches):
            values = proxies(index)[prober.step.token_mask(index)]
            square += float(values.square().sum())
            top = values.topk(min(most + len(named), len(values)))
            for size, number in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                found.append((size, _token(task, index, number, 0.0)))
        return found

    merged = _merge_sized(task, local)
    (rest,) = prober.ranks.sum([square])
    kept: list[Candidate] = []
    for size, candidate in merged:
        rest -= size**2
        if named.isdisjoint(candidate.tokens):
            if 16 * size**2 < rest or len(kept) == most:
                break
            kept.append(candidate)
    return kept


def non_finite(task: Task) -> list[Candidate]:
    """Spans whose coefficients are not finite numbers: found with no forward at all."""

    def local() -> list[tuple[float, Candidate]]:
        found = []
        for index, first, values in _rows(task, lambda index: task.prober.step.coefficients(index)[0]):
            bad = (~torch.isfinite(values)).nonzero().squeeze(-1).tolist()
            if len(bad) == len(values) and len(bad) > 1:
                found.append((1.0, _span(task, index, first, first + len(values), "sequence", 0.0)))
            else:
                found += [(1.0, _token(task, index, first + number, 0.0)) for number in bad]
        return found

    return _merge(task, local, set())


def _rows(task: Task, value: Callable[[int], torch.Tensor]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(micro_batch, number of the row's first token, the row's values at response tokens), rows without any skipped."""
    for index in range(task.prober.step.num_micro_batches):
        first = 0
        for row, mask in zip(value(index), task.prober.step.token_mask(index), strict=True):
            values = row[mask]
            if len(values):
                yield index, first, values
            first += len(values)


def _token(task: Task, index: int, number: int, bound: float) -> Candidate:
    return _span(task, index, number, number + 1, "token", bound)


def _span(task: Task, index: int, start: int, end: int, span: str, bound: float) -> Candidate:
    rank = task.prober.ranks.rank
    return Candidate(bound, span, tuple(Token(index, rank, number) for number in range(start, end)))


def _spans(values: torch.Tensor, least: float) -> list[tuple[int, int]]:
    """Intervals [start, end) of one row that are worth naming.

    Args:
        values: signed lower bounds on the norm of each token of the row, (num_tokens,).
        least: what a culprit has at least.
    """
    loud = (values.abs() >= least).nonzero().squeeze(-1).tolist()
    total = float(values.sum().abs())
    if total >= least:
        start, end = _window(values)
        carried = float(values[loud].sum().abs())
        if len(loud) > max(_FEW, (end - start) // 4) or carried < _LOUD_SHARE * total:
            while start > 0 and start - 1 in loud:  # the window holds most of the sum, maybe not its last loud token
                start -= 1
            while end in loud:
                end += 1
            return [(start, end)]
    return [(number, number + 1) for number in loud]


def _window(values: torch.Tensor) -> tuple[int, int]:
    """The shortest run that carries most of the sum, where that is at most half of the sequence; else all of it."""
    target = _WINDOW_SHARE * float(values.sum().abs())
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    sums = sums if sums[-1] >= 0 else -sums
    for length in range(1, len(values) // 2 + 1):
        carried = sums[length:] - sums[:-length]
        if float(carried.max()) >= target:
            start = int(carried.argmax())
            return start, start + length
    return 0, len(values)


def _merge(task: Task, local: Callable[[], list[tuple[float, Candidate]]], named: set[Token]) -> list[Candidate]:
    return [candidate for _, candidate in _merge_sized(task, local) if named.isdisjoint(candidate.tokens)]


def _merge_sized(task: Task, local: Callable[[], list[tuple[float, Candidate]]]) -> list[tuple[float, Candidate]]:
    ranks = task.prober.ranks
    found = [item for part in ranks.gather(ranks.agree(local)) for item in part]
    return sorted(found, key=lambda item: (-item[0], item[1].tokens[0]))
