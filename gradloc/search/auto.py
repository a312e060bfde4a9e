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
"""The default search: propose by shares and coefficients, verify the top few, certify, go on along what is left.

One round costs two forwards of each micro-batch (the shares of all tokens of all ranks), one probe for each of the few
candidates that are verified, and the certificate. When the rest still spikes, the next round measures shares along
that rest, which is what the certificate left in ``.grad``. Then whole sequences, then the norm sketch, which sees what
cancels; where shares cannot be trusted, the published bisection.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.certificate import certify
from ..core.gradients import Gradient
from .bisect import bisect
from .candidates import (
    Candidate,
    beside_louder,
    by_coefficient,
    by_share,
    by_value,
    largest_share,
    least_bound,
    most_verified,
    non_finite,
)
from .share import MAX_TRIES, ShareMap, measure_shares
from .sketch import sketch
from .task import Culprit, PathEntry, SearchResult, Source, Task, verify
from .triage import TRANSIENT, nothing_found, suspects

__all__ = ["auto", "share"]

_MAX_ROUNDS = 4
_MAX_HINTS = 2
_FAR = 3.0  # closure off by more than this factor is no rounding,
_STABLE = 1.5  # where two step sizes give it alike
_RESOLVED = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.1}  # of closure: less is no part unseen
_MUCH = 0.5  # of a spike, that few spans carry together where they are worth naming though more than may be named,
_MOST = 0.75  # that culprits carry beside a healthy rest,
_ABOVE = 10.0  # times their part of the batch's tokens: in a batch that is scaled as a whole spans carry less;
_NEARLY_ALL = 0.9  # of a spike:
_WELL_ABOVE = 3.0  # then this many times their part is enough, since none of few rows can carry ten times its part
_BY_FAR = 1.5  # times the threshold, and
_COARSE = 0.1  # of the spike or the culprits: a smaller rest is known too roughly from half-precision backwards
_REPEATS = 0.1  # of the norm: kernels that are not bit-reproducible differ by less


class _Search:
    """The state of one search: what is named so far, and the gradient that is left."""

    def __init__(self, task: Task):
        self.task = task
        self.prober = task.prober
        self.result = SearchResult()
        self._direction: Gradient = task.gradient
        self._scale = task.scale
        self._others: Gradient | None = None
        """What of the gradient is not the tokens', where that is a culprit's worth."""
        self._alone: Gradient | None = None
        """The culprits' own gradient, where each of them was measured by itself since the last certificate."""
        self._measured_along: Gradient | None = None
        self._norm = math.nan  # of the direction that shares were last measured along
        self._is_going_on = False
        """Whether there is another round."""

    def run(self, max_rounds: int, is_last_resort_allowed: bool) -> SearchResult:
        if not math.isfinite(self.task.spike.grad_norm):
            return self._trace_non_finite()
        for number in range(max_rounds):
            self._is_going_on = number + 1 < max_rounds
            shares = self._measure(number)
            if shares is None:
                return self._stop_exhausted()
            first = shares
            if not shares.is_trusted and self._is_explained_by(self._few_loud_tokens(shares)):
                return self.result
            if not shares.is_trusted and number == 0 and self._split_off_what_is_not_tokens():
                if self.result.certificate is not None:
                    return self.result
                shares = self._measure(number)
                if shares is None:
                    return self._stop_exhausted()
                first = shares
                if not shares.is_trusted and self._is_explained_by(self._few_loud_tokens(shares)):
                    return self.result
            if not shares.is_trusted:
                shares = self._measure_finer(number)
                if shares is None:
                    return self._stop_exhausted()
            if not shares.is_trusted:
                if self._is_explained_by(by_share(self.task, shares, set(self.result.tokens))):
                    return self.result
                self._fall_back("the shares do not add up to 1, so they are not used", is_last_resort_allowed)
                return self._doubt_the_backward(first) if number == 0 else self.result
            candidates = self._candidates(shares, with_hints=number == 0)
            if self._is_spread(shares, candidates):
                return self.result
            if not self._name(candidates):
                break
            if self._certify():
                return self.result
            if len(self.result.culprits) >= self.task.max_culprits:
                return self._count_more()
        if is_last_resort_allowed:
            return self._look_for_hidden()
        self.result.stop_reason = self.result.stop_reason or "no span of tokens carries enough of the gradient"
        return self.result

    # ---- stages

    def _measure(self, number: int, tries: Sequence[int] = range(1)) -> ShareMap | None:
        """Shares along what is left: first of the micro-batch that moved the running norm most, then of others."""
        shares = None
        for part in self._parts(number):
            if shares is None or self._is_more_to_see(shares, part):
                shares = self._measure_of(part, tries, known=shares)
                if shares is None:
                    return None
        if number == 0:
            self.result.shares = shares
        return shares

    def _parts(self, number: int) -> list[list[int]]:
        """In which order micro-batches are looked at: as long as one of these does not settle it, the next."""
        everything = list(range(self.prober.step.num_micro_batches))
        if number > 0 or self.task.increments is None:
            return [everything]
        suspects = self.task.suspects()
        rest = [index for index in everything if index not in suspects]
        return [part for part in (suspects[:1], suspects[1:], rest) if part]

    def _is_more_to_see(self, shares: ShareMap, part: Sequence[int]) -> bool:
        """Whether what these micro-batches do not carry is more than an error, and may hide a culprit."""
        unseen = 1 - shares.closure
        if not shares.is_trusted and unseen < 0:
            # what takes so much back is as large, by Cauchy-Schwarz, and the running norm has seen it come
            size = max(self.task.increments[index] for index in part) if self.task.increments else 0.0
            return size >= -unseen * shares.square**0.5 / 2
        if unseen < _RESOLVED[self.prober.step.compute_dtype]:
            return False
        return not shares.is_trusted or unseen * shares.square >= (self.task.reference / 2) ** 2

    def _measure_finer(self, number: int) -> ShareMap | None:
        """The smaller steps that :meth:`_measure` left out; all of them where the direction is a new one."""
        is_new = self._measured_along is not self._direction
        return self._measure(number + is_new, range(0 if is_new else 1, MAX_TRIES))

    def _measure_of(
        self, micro_batches: Sequence[int], tries: Sequence[int] = range(1), known: ShareMap | None = None
    ) -> ShareMap | None:
        if not self.task.can_afford(forwards=2 * len(micro_batches)):
            return None
        coefficients = self.prober.ranks.agree(lambda: self.task.coefficients(self.result.tokens))
        shares = measure_shares(self.prober, coefficients, self._direction, self._scale, micro_batches, tries, known)
        self._measured_along, self._norm = self._direction, shares.square**0.5
        verdict, seen = "measured" if shares.is_trusted else "untrusted", sorted(shares.seen)
        is_whole = len(seen) == self.prober.step.num_micro_batches
        of = "all micro-batches" if is_whole else f"micro-batches {seen} alone"
        self._note("share", verdict, f"the shares of {of} add up to {shares.closure:.4f}", shares.square**0.5)
        return shares

    def _candidates(self, shares: ShareMap, with_hints: bool) -> list[Candidate]:
        """Spans by share, and in the first round tokens by coefficient."""
        found = self._spans(shares)
        if with_hints:
            known = {*self.result.tokens, *(token for candidate in found for token in candidate.tokens)}
            found += by_coefficient(self.task, _MAX_HINTS, known)
        return found

    def _spans(self, shares: ShareMap) -> list[Candidate]:
        """Spans by share; where they carry little, also tokens that have to be measured, if few of them carry much.

        Of n loud tokens, alike and orthogonal, each has ||g|| = sqrt(<g, R>), and its bound is 1 / sqrt(n) of that.
        """
        task, named = self.task, set(self.result.tokens)
        found = by_share(task, shares, named)
        found += beside_louder(task, shares, named, found)
        if self._carried(shares, found)[0] < _MUCH:
            known = named | {token for candidate in found for token in candidate.tokens}
            bound = shares.square**-0.5
            more = by_value(task, lambda index: shares.products[index], task.culprit_norm**2, known, bound)
            found += more if self._are_few(shares, found + more) else []
        return found

    def _carried(self, shares: ShareMap, spans: list[Candidate]) -> tuple[float, float]:
        """What part of the direction these spans carry at least, and what part of the batch's tokens they are."""
        num_tokens = sum(len(candidate.tokens) for candidate in spans)
        carried = sum(candidate.bound for candidate in spans) / shares.square**0.5
        return carried, num_tokens / max(self.task.spike.num_tokens, 1)

    def _are_few(self, shares: ShareMap, spans: list[Candidate]) -> bool:
        """Whether some first ones of these spans carry much of the direction, and far more than their part."""
        for count in range(1, len(spans) + 1):
            carried, part = self._carried(shares, spans[:count])
            if carried > max(_MUCH, _ABOVE * part) or carried > max(_NEARLY_ALL, _WELL_ABOVE * part):
                return True
        return False

    def _is_spread(self, shares: ShareMap, candidates: list[Candidate]) -> bool:
        """Whether the spans that carry most of the spike are no more than a part of a batch of which all is loud.

        Without tokens that carry the part s of R its norm is at least (1 - s) ||R||. Where that spikes for as many as
        may be named, they are worth naming as the loudest of a few. Else they may explain the spike, and are worth it
        where they carry what culprits beside a healthy rest of half the threshold do, or far more than their part.
        """
        task, norm = self.task, shares.square**0.5
        room = task.max_culprits - len(self.result.culprits)
        if task.spike.threshold is None or any(candidate.bound == 0 for candidate in candidates):
            return False
        carried, part = self._carried(shares, candidates[:room])
        if not candidates:
            carried = largest_share(task, shares, room)
        if (1 - carried - abs(1 - shares.closure)) * norm <= task.spike.threshold:
            if not candidates or carried > min(_MOST * shares.closure, _ABOVE * part):
                return False
            why = f"the loudest spans, {part:.0%} of the batch's tokens, carry {carried:.0%} of it"
        else:
            if self._are_few(shares, candidates):
                return False
            why = f"{room} spans carry {carried:.0%} of it at most; without them the norm is still over the threshold"
        self.result.stop_reason = f"the spike is spread: {why}"
        self._note("share", "measured", self.result.stop_reason)
        return True

    def _few_loud_tokens(self, shares: ShareMap) -> list[Candidate]:
        """The tokens that stand out of shares that cannot be trusted, where they are few; spans may be noise."""
        norm, named = shares.square**0.5, set(self.result.tokens)
        found = by_value(self.task, lambda index: shares.products[index].abs() / norm, self.task.culprit_norm, named)
        return found if len(found) <= _MAX_HINTS else []

    def _is_explained_by(self, candidates: list[Candidate]) -> bool:
        """Name the first of them, each measured by itself, since their bounds are not to be trusted, and certify."""
        return self._name([replace(candidate, bound=0.0) for candidate in candidates[:_MAX_HINTS]]) and self._certify()

    def _name(self, candidates: list[Candidate]) -> bool:
        """Verify the top few and all hints, take the others at their bound; returns whether anything was named."""
        num_verified, has_named, most = 0, False, most_verified(self.task, self._norm, candidates)
        for candidate in candidates:
            # a sequence takes in what was named of it before
            within = [c for c in self.result.culprits if set(c.tokens) < set(candidate.tokens)]
            if len(self.result.culprits) - len(within) >= self.task.max_culprits:
                break
            taken = {token for culprit in self.result.culprits if culprit not in within for token in culprit.tokens}
            if not taken.isdisjoint(candidate.tokens):
                continue
            least = least_bound(self.task, self._norm, candidate)
            is_hint = candidate.bound < least
            if (is_hint or num_verified < most) and self.task.can_afford(backwards=1):
                num_verified += not is_hint
                culprit = self._verify(candidate)
            elif is_hint:
                continue
            else:
                culprit = Culprit(candidate.span, candidate.tokens, candidate.bound, least, is_exact=False)
            if not culprit.norm < culprit.threshold:
                self._add_up(culprit, is_alone=not within)
                self.result.culprits = [c for c in self.result.culprits if c not in within] + [culprit]
                has_named = True
        return has_named

    def _add_up(self, culprit: Culprit, is_alone: bool) -> None:
        """Keep the sum of what the culprits' own backwards gave, as long as each had one: it is in ``.grad``."""
        if not (culprit.is_exact and is_alone) or (self.result.culprits and self._alone is None):
            self._alone = None
            return
        if self._alone is not None:
            self.prober.add(self._alone)
        self._alone = self.prober.space.take()

    def _verify(self, candidate: Candidate) -> Culprit:
        culprit = verify(self.task, candidate.span, candidate.tokens, self.task.culprit_norm)
        first = candidate.tokens[0]
        where = f"{candidate.span} of rank {first.rank}, micro-batch {first.micro_batch}, from its token {first.index}"
        self.result.path.append(
            PathEntry(
                "verify",
                "under" if culprit.norm < culprit.threshold else "culprit",
                num_tokens=len(candidate.tokens),
                norm=culprit.norm,
                threshold=culprit.threshold,
                note=where if candidate.bound else f"{where}; proposed by its coefficient",
            )
        )
        return culprit

    def _certify(self) -> bool:
        """Certify what is named so far; the rest's gradient becomes the next direction. Returns whether it explains."""
        if self._spikes_without():
            return False
        task, spike = self.task, self.task.spike
        alone, self._alone = self._alone if self._others is None else None, None
        self._direction = self._measured_along = task.gradient  # a residual of before need not be held any longer
        certificate = certify(
            self.prober, task.gradient, task.scale, spike.grad_norm, spike.threshold, self.result.tokens, alone
        )
        self.result.certificate = certificate
        self._note("residual", certificate.verdict, certificate.reason, certificate.norm_after)
        self.result.stop_reason = certificate.reason
        is_done = certificate.verdict == "explained" or not math.isfinite(certificate.norm_after)
        if self._others is not None and not is_done:
            self.prober.add(self._others, alpha=-1.0)
            is_done = self.prober.space.norm() < task.reference
        self._direction, self._scale = self.prober.space.take(), 1.0
        return is_done

    def _spikes_without(self) -> bool:
        """Whether the culprits' own backwards tell that the rest spikes by far; it is then the next direction."""
        task, space, threshold = self.task, self.prober.space, self.task.spike.threshold
        has_room = self._is_going_on and len(self.result.culprits) < task.max_culprits
        if self._alone is None or self._others is not None or threshold is None or not has_room:
            return False
        named, square = self.result.culprits, task.spike.grad_norm**2
        alone = named[0].norm if len(named) == 1 else space.norm(self._alone)
        norm = max(square * (1 - 2 * math.fsum(culprit.share or 0.0 for culprit in named)) + alone**2, 0.0) ** 0.5
        if norm < max(_BY_FAR * threshold, _COARSE * task.spike.grad_norm, _COARSE * alone):
            return False
        space.clear()
        self.prober.add(task.gradient, alpha=1.0 / task.scale)
        self.prober.add(self._alone, alpha=-1.0)
        self._direction, self._scale = space.take(), 1.0
        self._note("residual", "measured", "without the culprits' own gradients the norm is over the threshold", norm)
        return True

    def _split_off_what_is_not_tokens(self) -> bool:
        """Measure the gradient that is left when no token passes any: a loss of a router's, a regulariser's.

        Where it is a culprit's worth, the tokens' own part is the direction from here on. One probe where it is not.

        Returns:
            Whether it is.
        """
        task, prober, space = self.task, self.prober, self.prober.space
        num = prober.step.num_micro_batches
        if not task.can_afford(backwards=num):
            return False
        prober.compute([(0, torch.zeros_like(prober.step.token_mask(0)))])
        if num * space.norm() < task.culprit_norm:
            return False
        prober.compute((index, torch.zeros_like(prober.step.token_mask(index))) for index in range(num))
        squares, others = space.squares_by_name(), space.take()
        others_norm = math.fsum(squares.values()) ** 0.5
        if others_norm < task.culprit_norm:
            return False
        prober.add(task.gradient, alpha=1.0 / task.scale)
        prober.add(others, alpha=-1.0)
        of_tokens = space.squares_by_name()
        tokens_norm = math.fsum(of_tokens.values()) ** 0.5
        self._direction, self._scale, self._others = space.take(), 1.0, others
        self.result.culprits, self.result.certificate, self._alone = [], None, None
        bound = torch.finfo(prober.step.compute_dtype).eps * others_norm  # both were added up in the backward
        why = (
            f"a part of the gradient, of norm {others_norm:.3g}, passes through no token's log-prob or entropy; the "
            f"tokens' part has norm {tokens_norm:.3g} (within {bound:.2g})"
        )
        numbers = {"tokens_norm": tokens_norm, "others_norm": others_norm, "error_bound": bound}
        self._blame(Source("not_tokens", why, numbers, suspects(squares, of_tokens)), others_norm)
        if tokens_norm < task.reference:
            self.result.certificate = nothing_found(task, why)
        return True

    def _doubt_the_backward(self, first: ShareMap) -> SearchResult:
        """Where no token explains the spike, and the gradient is not what the log-probs' change says.

        It is not the tokens' when it does not come back as everything is run again, or when two step sizes agree about
        how far it is off: then something scales it on its way, a hook or a backward of somebody's own.

        Args:
            first: the shares along the spike's gradient, as measured first.
        """
        task, prober, space = self.task, self.prober, self.prober.space
        if 1 / _FAR <= first.closure <= _FAR or (self.result.culprits and self._certify()):
            return self.result
        everything = range(prober.step.num_micro_batches)
        prober.compute((index, None) for index in everything)
        norm = space.norm()
        prober.add(task.gradient, alpha=-1.0 / task.scale)
        difference = space.norm() / task.spike.grad_norm
        if difference > _REPEATS:
            source = Source("transient", TRANSIENT, {"rerun_norm": norm, "rerun_difference": difference})
        else:
            coefficients = prober.ranks.agree(lambda: task.coefficients([]))
            half = replace(first, step=first.step / 2)
            second = measure_shares(prober, coefficients, task.gradient, task.scale, everything, range(1), half)
            if not (second.closure and 1 / _STABLE < first.closure / second.closure < _STABLE):
                return self.result
            why = "the gradient is not the derivative of the tokens' log-probs: something scales it in the backward"
            numbers = {"closure": first.closure, "tokens_norm": first.closure * task.spike.grad_norm}
            source = Source("not_tokens", why, numbers, suspects(space.squares_by_name(task.gradient)))
        self._blame(source, norm)
        self.result.culprits = []
        self.result.certificate = nothing_found(task, source.reason)
        return self.result

    def _blame(self, source: Source, norm: float) -> None:
        self.result.source, self.result.stop_reason = source, source.reason
        self._note("others", "measured", source.reason, norm)

    def _trace_non_finite(self) -> SearchResult:
        """A coefficient that is not a finite number names its token with no forward at all."""
        candidates, most = non_finite(self.task), self.task.max_culprits
        if not candidates:
            why = "all coefficients are finite, so it was the backward that made the gradient non-finite"
            return self._fall_back(why, is_allowed=True)
        self._note("coefficients", "culprit", f"{len(candidates)} spans have a coefficient that is not finite")
        for candidate in candidates[:most]:
            culprit = Culprit(candidate.span, candidate.tokens, math.nan, self.task.culprit_norm, is_exact=True)
            self.result.culprits.append(culprit)
        self._certify()
        self._cut(len(candidates) - most)
        return self.result

    def _count_more(self) -> SearchResult:
        """As many culprits are named as may be, and the rest still spikes: what else there is, by its shares."""
        shares = self._measure(number=1)
        if shares is None or not shares.is_trusted:
            self._cut(0)
            return self.result
        more = self._spans(shares)
        self._cut(len(more), math.hypot(*(candidate.bound for candidate in more)))
        return self.result

    def _cut(self, num_more: int, norm: float | None = None) -> None:
        """Say that there are culprits beyond the largest number, where there are."""
        result, most = self.result, self.task.max_culprits
        is_explained = result.certificate is not None and result.certificate.verdict == "explained"
        if num_more < 0 or (num_more == 0 and is_explained):
            return
        result.is_cut, result.num_more, result.more_norm = True, num_more, norm if num_more else None
        more = f", and at least {num_more} more are left" if num_more else ""
        result.stop_reason = f"search.max_culprits={most} are named{more}"

    def _look_for_hidden(self) -> SearchResult:
        """What shares cannot see: tokens that cancel each other, or hide from the gradient's direction."""
        found = sketch(self.task, self.result.tokens)
        self.result.path += found.path
        if found.exhausted:
            return self._stop_exhausted()
        room = self.task.max_culprits - len(self.result.culprits)
        self.result.culprits += found.culprits[:room]
        self._alone = None
        if found.culprits:
            self._certify()
        else:
            self.result.stop_reason = "no token, segment or sequence (else) stands out: the spike is spread"
        return self.result

    def _fall_back(self, why: str, is_allowed: bool) -> SearchResult:
        self.result.stop_reason = why
        if is_allowed:
            self._note("bisect", "measured", why)
            found = bisect(self.task)
            named = set(self.result.tokens)
            self.result.path += found.path
            # bisection's own leaves are held against the published per-token threshold, which loud healthy tokens pass
            self.result.culprits += [
                culprit
                for culprit in found.culprits
                if named.isdisjoint(culprit.tokens) and not culprit.norm < self.task.culprit_norm
            ]
            self.result.exhausted, self.result.certificate, self._alone = found.exhausted, None, None
            self.result.stop_reason = f"{why}; bisection: {found.stop_reason}"
        return self.result

    def _stop_exhausted(self) -> SearchResult:
        self.result.exhausted = True
        self.result.stop_reason = f"the budget of {self.task.budget} probes was used up"
        return self.result

    def _note(self, phase: str, verdict: str, note: str, norm: float | None = None) -> None:
        self.result.path.append(PathEntry(phase, verdict, norm=norm, note=note))


def auto(task: Task) -> SearchResult:
    """Find all culprits, certified: shares, exact checks, the residual, sequences, the norm sketch, bisection.

    Args:
        task: what to search; ``.grad`` is overwritten, weights are moved and restored bit for bit.
    """
    return _Search(task).run(_MAX_ROUNDS, is_last_resort_allowed=True)


def share(task: Task) -> SearchResult:
    """One round of shares along the gradient, and its certificate."""
    return _Search(task).run(1, is_last_resort_allowed=False)
