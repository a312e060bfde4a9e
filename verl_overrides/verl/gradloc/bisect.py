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
"""The published search: global -> micro-batch -> rank -> token, halving what is over its threshold.

Source: GradLoc (Tencent Hunyuan), method figure. A token's loss gradient is taken as noise of norm tau at most, so
that a mean over n tokens has norm about tau / sqrt(n). The published thresholds are for *means over a part*:

    global tau/sqrt(N);  micro-batch tau*sqrt(M)/sqrt(N);  l ranks tau*sqrt(M)*sqrt(W)/(sqrt(N)*sqrt(l));
    a segment of L tokens tau/sqrt(L)

Our probes are additive: they measure sum_t w_t * gamma_t, with gamma_t the token's own gradient and w_t its weight
in the step's loss (1/N when all tokens weigh the same). Under the same noise model such a sum has norm
tau * sqrt(sum_t w_t^2), which is the published threshold times the part's weight. One formula thus serves all four
phases, and the verdict does not depend on how the tokens are dealt out to ranks and micro-batches.

Differences from the published code: every part over its threshold is followed, worst first, not only the largest;
probes are exact parts of the gradient; NaN and inf count as over; nothing found is a result.
"""

import heapq
import math
from dataclasses import dataclass, field

import torch

from .probe import Measurement, Prober
from .selection import Part, Token

__all__ = ["Culprit", "PathEntry", "SearchResult", "bisect"]


@dataclass
class PathEntry:
    """One probed part and what came of it."""

    phase: str
    part: Part
    num_tokens: int
    norm: float
    threshold: float
    verdict: str
    """``under``: below its threshold; ``split``: a half was over; ``spread``: over, but neither half is;
    ``culprit``: a single token over; ``unopened``: over, but the search stopped before looking inside."""


@dataclass
class Culprit:
    """A token whose own gradient was measured to be over its threshold."""

    token: Token
    norm: float
    threshold: float
    squares: torch.Tensor
    """Squared norm per parameter, float64 (num_params,)."""
    dots: torch.Tensor
    """Inner product with the spike gradient per parameter, float64 (num_params,)."""


@dataclass
class SearchResult:
    """What a strategy found, and the way it went."""

    culprits: list[Culprit] = field(default_factory=list)
    path: list[PathEntry] = field(default_factory=list)
    stop_reason: str = ""
    exhausted: bool = False
    """Whether the budget ended the search."""


class _Search:
    """The state of one bisection: a heap of parts that are over their threshold, worst first."""

    def __init__(self, prober: Prober, spike: list, tau: float, budget: int, max_culprits: int):
        self.prober = prober
        self.spike = spike
        self.tau = tau
        self.budget = budget
        self.max_culprits = max_culprits
        self.result = SearchResult()
        self._open: list[tuple[float, int, PathEntry]] = []

    def run(self) -> SearchResult:
        size = self.prober.ranks.size
        for micro_batch in range(self.prober.step.num_micro_batches):
            if not self._has_budget():
                return self._stop()
            self._probe("micro_batch", Part(micro_batch, 0, size))
        if not self._open:
            self.result.stop_reason = "no micro-batch is over its threshold"
        while self._open and len(self.result.culprits) < self.max_culprits:
            if not self._has_budget(2):
                return self._stop()
            _, _, entry = heapq.heappop(self._open)
            self._split(entry)
        return self._stop()

    def _has_budget(self, num_probes: int = 1) -> bool:
        self.result.exhausted = self.prober.num_backwards + num_probes > self.budget
        return not self.result.exhausted

    def _probe(self, phase: str, part: Part) -> bool:
        """Measure a part and file it; returns whether it is over its threshold."""
        found = self.prober.measure(part)
        threshold = self.tau * found.weight_norm
        is_over = not math.isfinite(found.norm) or found.norm > threshold
        entry = PathEntry(phase, part, found.num_tokens, found.norm, threshold, "unopened" if is_over else "under")
        self.result.path.append(entry)
        if is_over and part.num_ranks == 1 and found.num_tokens == 1:
            entry.verdict = "culprit"
            self._add_culprit(part, found, threshold)
        elif is_over:
            ratio = found.norm / threshold if math.isfinite(found.norm) and threshold > 0 else math.inf
            heapq.heappush(self._open, (-ratio, len(self.result.path), entry))
        return is_over

    def _split(self, entry: PathEntry) -> None:
        halves = entry.part.halves(entry.num_tokens)
        phase = "rank" if entry.part.num_ranks > 1 else "token"
        over = [self._probe(phase, half) for half in halves]
        entry.verdict = "split" if any(over) else "spread"

    def _add_culprit(self, part: Part, found: Measurement, threshold: float) -> None:
        space = self.prober.space
        index = part.first_token
        self.result.culprits.append(
            Culprit(
                Token(part.micro_batch, part.first_rank, index),
                found.norm,
                threshold,
                space.squares(),
                space.dots(space.current(), self.spike),
            )
        )

    def _stop(self) -> SearchResult:
        result = self.result
        if result.exhausted:
            result.stop_reason = f"the budget of {self.budget} probes was used up"
        elif len(result.culprits) >= self.max_culprits:
            result.stop_reason = f"{self.max_culprits} culprits were found, as many as search.max_culprits allows"
        elif result.culprits:
            result.stop_reason = "every part over its threshold was followed to its end"
        elif not result.stop_reason:
            result.stop_reason = "parts are over their threshold, but no single token in them is: the spike is spread"
        return result


def bisect(prober: Prober, spike: list, tau: float, budget: int, max_culprits: int) -> SearchResult:
    """Find the tokens whose own gradient is over ``tau`` times their loss weight.

    Args:
        prober: the step to search; its ``.grad`` is overwritten.
        spike: the training gradient that was set aside (possibly scaled by clipping), for the culprits' shares.
        tau: threshold on the norm of one token's own loss gradient, before its weight in the loss; positive.
        budget: largest number of probes, one forward and backward of one micro-batch each.
        max_culprits: stop after this many.

    Returns:
        The culprits, worst first within the order of the search, and every probe made. The same on every rank.
        A culprit whose part holds others that cancel it is missed: use a strategy that sees through cancellation.
    """
    return _Search(prober, spike, tau, budget, max_culprits).run()
