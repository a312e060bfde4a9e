# SPDX-License-Identifier: Apache-2.0
"""The published search: global -> micro-batch -> rank -> token, halving each part that is over its threshold.

Source: GradLoc (Tencent Hunyuan), method figure; docs/method.md, section 5. A part's probe measures a sum over its
tokens; its threshold, tau times the L2 norm of their weights in the loss, is the published one times the part's weight.

Unlike the published code, this follows every part over its threshold, worst first, and not only the largest. Probes
are exact parts of the gradient. NaN and inf count as over. Nothing found is a result.
"""

import heapq
import math
from dataclasses import replace

from ..core.selection import Part
from ..record import PathEntry
from .task import SearchResult, Span, Task, with_measured_norm


class _Bisection:
    """The state of one bisection: a heap of parts that are over their threshold, worst first."""

    def __init__(self, task: Task):
        self.task = task
        self.prober = task.prober
        self.result = SearchResult()
        self._open: list[tuple[float, int, Part, int]] = []
        """(-norm / threshold, place in the path, the part, how many tokens it has)"""

    def run(self) -> SearchResult:
        size = self.prober.ranks.size
        known = self.task.broken
        for micro_batch in range(self.prober.step.num_micro_batches) if known is None else [known]:
            if not self._has_budget():
                return self._stop()
            self._probe("micro_batch", Part(micro_batch, 0, size))
        if not self._open:
            self.result.stop_reason = "no micro-batch is over its threshold"
        while self._open and len(self.result.culprits) < self.task.max_culprits:
            if not self._has_budget(num_probes=2):
                return self._stop()
            self._split(*heapq.heappop(self._open)[1:])
        return self._stop()

    def _has_budget(self, num_probes: int = 1) -> bool:
        self.result.exhausted = not self.task.can_afford(backwards=num_probes)
        return not self.result.exhausted

    def _probe(self, phase: str, part: Part) -> bool:
        """Measure a part. If it is over its threshold, name a token, queue anything larger. Returns whether it is."""
        found = self.prober.measure(part)
        threshold = self.task.tau * found.weight_norm
        is_over = not math.isfinite(found.norm) or found.norm > threshold
        is_token = is_over and part.num_ranks == 1 and found.num_tokens == 1
        entry = PathEntry(
            phase,
            micro_batch=part.micro_batch,
            ranks=(part.first_rank, part.end_rank),
            tokens=None if part.end_token is None else (part.first_token, part.end_token),
            num_tokens=found.num_tokens,
            norm=found.norm,
            threshold=threshold,
            verdict="culprit" if is_token else "unopened" if is_over else "under",
        )
        self.result.path.append(entry)
        if is_token:
            first = part.first_token
            token = Span(0.0, "token", part.micro_batch, part.first_rank, first, first + 1)
            self.result.culprits.append(with_measured_norm(self.task, token, threshold))
        elif is_over:
            ratio = found.norm / threshold if math.isfinite(found.norm) and threshold > 0 else math.inf
            heapq.heappush(self._open, (-ratio, len(self.result.path) - 1, part, found.num_tokens))
        return is_over

    def _split(self, place: int, part: Part, num_tokens: int) -> None:
        phase = "rank" if part.num_ranks > 1 else "token"
        over = [self._probe(phase, half) for half in part.halves(num_tokens)]
        path = self.result.path
        path[place] = replace(path[place], verdict="split" if any(over) else "spread")

    def _stop(self) -> SearchResult:
        result = self.result
        if result.exhausted:
            result.stop_reason = self.task.limit.words
        elif len(result.culprits) >= self.task.max_culprits:
            result.stop_reason = f"{self.task.max_culprits} culprits were found, as many as search.max_culprits allows"
        elif result.culprits:
            result.stop_reason = "every part over its threshold was followed to its end"
        elif not result.stop_reason:
            result.stop_reason = "parts are over their threshold, but no single token in them is: the spike is spread"
        return result


def bisect(task: Task) -> SearchResult:
    """Find the tokens whose own gradient is over ``tau`` times their loss weight; ``.grad`` is overwritten.

    The result has the culprits in the order found and every probe made. A culprit that others in its part cancel is
    missed; ``share`` sees some of those.
    """
    return _Bisection(task).run()
