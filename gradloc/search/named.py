# SPDX-License-Identifier: Apache-2.0
"""What a search has named so far, and the gradient that is left: candidates are verified, added up, certified."""

import math
from typing import Any

from ..core.gradients import Gradient
from ..record import PathEntry
from .candidates import Candidate, least_bound, most_verified
from .task import CulpritSpan, SearchResult, Task, measured_culprit, verify

_BY_FAR = 1.5  # times the threshold: a rest beyond it spikes, and no certificate need say so,
_COARSE = 0.1  # unless it is less than this part of the spike or of the culprits, which half precision may get wrong


class Named:
    """The state of one search. Its direction R is the gradient at first, then what the culprits left of it."""

    def __init__(self, task: Task):
        self.task = task
        self.prober = task.prober
        self.result = SearchResult()
        self.direction: Gradient = task.gradient
        self.scale = task.scale
        self.others: Gradient | None = None
        """The part of the gradient that passes through no token, if it is as large as a culprit."""
        self.alone: Gradient | None = None
        """Sum of the culprits' gradients, while each was measured by itself; emptied by a certificate."""
        self.norm = math.nan  # ||R|| of the last shares
        self.is_going_on = False
        """Whether another round may follow."""

    def name(self, candidates: list[Candidate]) -> bool:
        """Name the candidates that are culprits, loudest first; returns whether any was.

        A hint, whose bound is too low to name it, needs a backward of its own. So do the first few others, for their
        exact norm. The rest is named by its bound. Backwards for hints still to come are kept back from the budget.
        """
        num_verified, has_named, most = 0, False, most_verified(self.task, self.norm, candidates)
        num_hints = sum(candidate.bound < least_bound(self.task, self.norm, candidate) for candidate in candidates)
        for candidate in candidates:
            # a sequence takes the place of its tokens that were named before
            within = [c for c in self.result.culprits if set(c.tokens) < set(candidate.tokens)]
            if len(self.result.culprits) - len(within) >= self.task.max_culprits:
                break
            taken = {token for culprit in self.result.culprits if culprit not in within for token in culprit.tokens}
            if not taken.isdisjoint(candidate.tokens):
                continue
            least = least_bound(self.task, self.norm, candidate)
            is_hint = candidate.bound < least
            num_hints -= is_hint
            if (is_hint or num_verified < most) and self.task.can_afford(backwards=1 + (0 if is_hint else num_hints)):
                num_verified += not is_hint
                culprit = self.verify(candidate)
            elif is_hint:
                continue
            else:
                culprit = CulpritSpan(candidate.span, candidate.tokens, candidate.bound, least, is_exact=False)
            if not culprit.norm < culprit.threshold:  # NaN is a culprit, too
                self.add_up(culprit, is_alone=not within)
                self.result.culprits = [c for c in self.result.culprits if c not in within] + [culprit]
                has_named = True
        return has_named

    def add_up(self, culprit: CulpritSpan, is_alone: bool) -> None:
        """Add the culprit's gradient in ``.grad`` to ``alone``, or give that sum up if one of its parts is unknown."""
        if not (culprit.is_exact and is_alone) or (self.result.culprits and self.alone is None):
            self.alone = None
            return
        if self.alone is not None:
            self.prober.add(self.alone)
        self.alone = self.prober.space.keep()

    def verify(self, candidate: Candidate) -> CulpritSpan:
        culprit = verify(self.task, candidate.span, candidate.tokens, self.task.culprit_norm)
        first = candidate.tokens[0]
        where = f"{candidate.span} of rank {first.rank}, micro-batch {first.micro_batch}, from its token {first.index}"
        note = where if candidate.bound else f"{where}; proposed by its coefficient"
        verdict, size = "under" if culprit.norm < culprit.threshold else "culprit", len(candidate.tokens)
        self.note("verify", verdict, note, culprit.norm, num_tokens=size, threshold=culprit.threshold)
        return culprit

    def certify(self) -> bool:
        """Certify what is named so far; returns whether the search is over. What is left becomes the next direction."""
        if self._spikes_without():
            return False
        task = self.task
        alone, self.alone = self.alone if self.others is None else None, None
        self.direction = task.gradient  # frees the last residual, before the next one is made
        certificate = task.certify(self.result.tokens, alone, self.is_going_on)
        if len(self.result.culprits) == 1 and not self.result.culprits[0].is_exact:
            self._measure_by_difference()
        self.result.certificate = certificate
        self.note("residual", certificate.verdict, certificate.reason, certificate.norm_after)
        self.result.stop_reason = certificate.reason
        is_done = certificate.verdict == "explained" or not math.isfinite(certificate.norm_after or 0.0)
        if self.others is not None and not is_done:
            self.prober.add(self.others, alpha=-1.0)
            is_done = self.prober.space.norm() < task.reference
        self.direction, self.scale = self.prober.space.keep(), 1.0
        return is_done

    def _measure_by_difference(self) -> None:
        """The only culprit's own gradient, with no backward: the spike less what the certificate left in ``.grad``."""
        space, (culprit,) = self.prober.space, self.result.culprits
        rest = space.keep()
        self.prober.add(self.task.gradient, alpha=1.0 / self.task.scale)
        self.prober.add(rest, alpha=-1.0)
        self.result.culprits = [measured_culprit(self.task, culprit.span, culprit.tokens, self.task.culprit_norm)]
        space.put(rest)

    def _spikes_without(self) -> bool:
        """Whether the culprits' own backwards show that the rest spikes by far. It is then the next direction.

        No pass is needed: ||G - g||^2 = ||G||^2 - 2 <g, G> + ||g||^2, with <g, G> = ||G||^2 times the shares' sum.
        """
        task, space, threshold = self.task, self.prober.space, self.task.spike.threshold
        has_room = self.is_going_on and len(self.result.culprits) < task.max_culprits
        if self.alone is None or self.others is not None or threshold is None or not has_room:
            return False
        named, square = self.result.culprits, task.spike.grad_norm**2
        alone = named[0].norm if len(named) == 1 else space.norm(self.alone)
        norm = max(square * (1 - 2 * math.fsum(culprit.share or 0.0 for culprit in named)) + alone**2, 0.0) ** 0.5
        if norm < max(_BY_FAR * threshold, _COARSE * task.spike.grad_norm, _COARSE * alone):
            return False
        space.clear()
        self.prober.add(task.gradient, alpha=1.0 / task.scale)
        self.prober.add(self.alone, alpha=-1.0)
        self.direction, self.scale = space.keep(), 1.0
        self.note("residual", "measured", "without the culprits' own gradients the norm is over the threshold", norm)
        return True

    def cut(self, num_more: int, norm: float | None = None) -> None:
        """Record that ``max_culprits`` ended the search, unless what is named explains the spike and nothing is left.

        Args:
            num_more: spans as large as a culprit that are not named; below 0 if not even the limit was reached.
            norm: lower bound on the norm of these together.
        """
        result, most = self.result, self.task.max_culprits
        is_explained = result.certificate is not None and result.certificate.verdict == "explained"
        if num_more < 0 or (num_more == 0 and is_explained):
            return
        result.is_cut, result.num_more, result.more_norm = True, num_more, norm if num_more else None
        more = f", and at least {num_more} more are left" if num_more else ""
        result.stop_reason = f"search.max_culprits={most} are named{more}"

    def note(self, phase: str, verdict: str, note: str, norm: float | None = None, **more: Any) -> None:
        self.result.path.append(PathEntry(phase, verdict=verdict, norm=norm, note=note, **more))
