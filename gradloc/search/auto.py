# SPDX-License-Identifier: Apache-2.0
"""The default search: shares name candidates, backwards verify the top few, a certificate says whether they explain it.

One round costs two forwards of each micro-batch (the shares of all tokens of all ranks), one probe for each candidate
that is verified, and the certificate. If the rest still spikes, the next round measures shares along that rest, which
the certificate left in ``.grad``. In the end comes the norm sketch, which sees tokens that cancel. If shares cannot be
trusted, candidates are verified one by one, and then comes the published bisection. docs/method.md, sections 3 and 4.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.certificate import Alone, backward_again, is_subtracted, judge, unit_of
from ..core.gradients import Gradient
from ..record import Certificate, PathEntry, StepCause
from .beside import doubt_backward, nothing_found, split_off
from .bisect import bisect
from .candidates import (
    apart,
    beside_louder,
    by_coefficient,
    by_share,
    by_value,
    carried,
    carried_by,
    least_bound,
    leaves_much,
    masks_of,
    most_verified,
    non_finite,
    stand_out,
    weighed,
)
from .share import MOST_TO_SETTLE, ShareMap, ShareMeasurement
from .sketch import sketch
from .task import SearchResult, Span, Task, measured, tokens_of, verify

_MAX_ROUNDS = 4
_MAX_HINTS = 2  # tokens that are verified though no share names them
_MAX_MISSES = 2  # tokens in the order of shares that do not add up, and are no culprits, before the others are let be
_FEW_TO_MEASURE = 3  # candidates: so many are measured by themselves in any case, which costs less than a pass
_MANY = 64  # tokens that their coefficients may single out
_RESOLVED = 0.02  # of closure: if less is missing, nothing more is read
_ODD = 0.15  # of closure: a gradient in half precision is mostly off by less
_NOTABLE = 0.01  # of closure: with more noise than that a loud token may be missed
_TINY = 1e-300  # of a product: less is nothing
_BY_FAR = 1.5  # times the threshold: a rest beyond it spikes, and no certificate need say so,
_COARSE = 0.1  # unless it is less than this part of the spike or of the culprits, which half precision may get wrong
MOST_OF_BATCH = 0.25  # of its tokens: more of them, pulled as all are, are no culprits but the batch


class _AutoSearch:
    """The stages of one search, in their order; ``number`` is that of the round, from 0.

    Its direction R is the gradient at first, then what the culprits left of it.
    """

    def __init__(self, task: Task):
        self.task, self.prober = task, task.prober
        self.result = SearchResult()
        self.direction: Gradient = task.gradient
        self.scale = task.scale
        self.others: Gradient | None = None
        """The part of the gradient that passes through no token, if it is as large as a culprit."""
        self.alone: Alone | None = None
        """While each culprit was measured by itself."""
        self.norm = math.nan  # ||R|| of the last shares
        self.is_going_on = False
        """Whether another round may follow."""
        self.is_explained_by_more = False
        """Whether culprits that are not named explain the spike together with those that are."""
        self._is_split = False  # whether a part that passes through no token was looked for

    def run(self, max_rounds: int, is_last_resort_allowed: bool) -> SearchResult:
        """Name culprits, certified; where they do not explain the spike, only those that stand out of the batch."""
        self._run_rounds(max_rounds, is_last_resort_allowed)
        self._settle()
        return self.result

    def _run_rounds(self, max_rounds: int, is_last_resort_allowed: bool) -> None:
        """Round after round until what is named explains the spike; then sketch or bisection, if those are allowed."""
        shares, first = None, 0
        if not math.isfinite(self.task.spike.grad_norm):
            if not self._trace_non_finite(is_last_resort_allowed):
                return
            first = 1  # finite now, and still a spike: the next direction
        for number in range(first, max_rounds):
            self.is_going_on = number + 1 < max_rounds
            shares = self._measure(number)
            if shares is not None and self._is_not_of_tokens(shares):
                if self.result.certificate is not None:
                    return
                shares = self._measure(number)  # along the tokens' own part
            if shares is None:
                self._stop_exhausted()
                return
            candidates = self._candidates(shares, with_hints=number == 0)
            if self._is_spread(shares, candidates):
                return
            if not self.name(candidates):
                break
            if self.certify():
                return
            if len(self.result.culprits) >= self.task.max_culprits:
                self._count_more()
                return
        if shares is not None and not self.result.culprits and self._is_the_backward_s(shares):
            return
        if is_last_resort_allowed and (shares is None or shares.is_trusted):
            self._look_for_hidden()
        else:
            self._fall_back("the shares do not add up to 1 and the loudest explain nothing", is_last_resort_allowed)

    # ---- stages

    def _is_not_of_tokens(self, shares: ShareMap) -> bool:
        """Whether shares do not add up because a part of the gradient passes through no token, or through a backward
        that scales it. The cause is then noted; where tokens have a part to search, ``direction`` is that part."""
        is_odd = not shares.is_trusted or (abs(1 - shares.closure) > _ODD and not shares.unseen)
        if not is_odd or shares.is_noisy or shares.is_short or self.others is not None or self._is_split:
            return False
        self._is_split = True
        if self._is_in_parts():
            return True
        is_precise = self.prober.step.numerics.dtype == torch.float32  # else rounding alone may turn what cancels
        return is_precise and self._is_the_backward_s(shares)

    def _measure(self, number: int) -> ShareMap | None:
        """Shares along R: first of the micro-batch that raised the running norm most, then of others if need be.

        Returns None if the search may not cost as much.
        """
        shares = None
        for part in self._parts(number):
            if shares is None or self._is_more_to_see(shares, part):
                shares = self._measure_of(part, known=shares)
                if shares is None:
                    return None
                is_moved = math.isfinite(shares.closure)  # few weights may move none beyond their rounding
                if is_moved and not (shares.is_trusted or shares.is_noisy or shares.is_short or shares.is_far):
                    shares = self._measure_of(sorted(shares.seen), refined=shares) or shares  # at a shorter step
        if number == 0:
            self.result.shares = shares
        return shares

    def _parts(self, number: int) -> list[list[int]]:
        """The micro-batches in the order in which they are read, a part at a time until the shares settle it."""
        everything = list(range(self.prober.step.num_micro_batches))
        suspects = self.task.suspects() if self.task.increments else []
        if number > 0:  # where culprits were, there may be more
            suspects = sorted({token.micro_batch for token in self.result.tokens})
        first = 1 if number == 0 else len(suspects)
        rest = [index for index in everything if index not in suspects]
        return [part for part in (suspects[:first], suspects[first:], rest) if part]

    def _is_more_to_see(self, shares: ShareMap, part: Sequence[int]) -> bool:
        """Whether what was read leaves more of R than an error, so that ``part`` may hide a culprit.

        Micro-batches whose norms add up to less than the threshold make no spike.
        """
        unseen = 1 - shares.closure
        sizes = self.task.increments if self.direction is self.task.gradient else None
        if self.prober.is_wide:  # closure goes by a gradient in half precision, which says little
            most = sum(size for index, size in enumerate(sizes) if index not in shares.seen) if sizes else math.inf
            return most >= self.task.reference / 2
        if not shares.is_trusted and unseen < 0:
            # Read so far carries more than R, so something unread takes it back. By Cauchy-Schwarz that is at least
            # as large, and then the running norm has seen it come (half: it is rough).
            size = max(self.task.increments[index] for index in part) if self.task.increments else 0.0
            return size >= -unseen * shares.square**0.5 / 2
        if unseen < max(_RESOLVED, (3 if shares.is_noisy else 2) * shares.noise):
            return False
        if not shares.is_trusted:
            return True
        most = sum(size for index, size in enumerate(sizes) if index not in shares.seen) if sizes else math.inf
        return most >= self.task.reference and unseen * shares.square >= (self.task.reference / 2) ** 2

    def _measure_of(
        self, micro_batches: Sequence[int], known: ShareMap | None = None, refined: ShareMap | None = None
    ) -> ShareMap | None:
        task = self.task
        to_settle = MOST_TO_SETTLE if known is None and refined is None else 0
        if not task.can_afford(forwards=2 * len(micro_batches) + to_settle):
            return None
        readouts = self.prober.ranks.agree(lambda: task.readouts(self.result.culprits))
        sizes = task.increments if self.direction is task.gradient else None
        along = self.direction, self.scale
        shares = ShareMeasurement(self.prober, readouts, *along, micro_batches, known, refined, sizes).run()
        self.norm = shares.square**0.5
        verdict, seen = "measured" if shares.is_trusted else "untrusted", sorted(shares.seen)
        is_whole = len(seen) == self.prober.step.num_micro_batches
        of = "all micro-batches" if is_whole else f"micro-batches {seen} alone"
        note = f"the shares of {of} add up to {shares.closure:.4f} (+- {shares.closure_error:.2g})"
        if math.isnan(shares.closure):
            note = f"the shares of {of} are not finite: rounding undid the move, or outputs overflowed"
        self.note("share", verdict, note, shares.square**0.5)
        return shares

    def _candidates(self, shares: ShareMap, with_hints: bool) -> list[Span]:
        """Spans that are culprits by their bound, loudest first; then tokens that a backward of their own has to prove.

        These are, in the first round, the tokens with the largest coefficients, and without any span the loudest: what
        shares say of the order holds also where they do not add up.
        """
        task, named = self.task, self.result.culprits
        loud = by_coefficient(task, _MANY, named, shares.square**0.5)
        masks = self.prober.ranks.agree(lambda: masks_of(task, loud))
        found = self._spans(replace(shares, singled_out=masks)) if shares.is_trusted else []
        by_share_alone, is_found = [candidate for candidate in found if not candidate.is_weighed], bool(found)
        if with_hints and not self.prober.is_wide or not found:
            hints = by_coefficient(task, _MAX_HINTS, [*named, *by_share_alone])
            found = found + apart(found, hints)
        is_open = not is_found or (shares.noise > _NOTABLE and self._spikes_beside(shares, found))
        most = (_MAX_HINTS if shares.is_trusted else task.max_culprits) if is_open else 0
        sizes = [part.abs().nan_to_num(nan=0.0, posinf=0.0) for part in shares.products] if most else []
        loudest = by_value(task, sizes.__getitem__, _TINY, [*named, *found])[:most] if most else []
        return found + loudest

    def _spans(self, shares: ShareMap) -> list[Span]:
        """Spans by share. If these carry little, also tokens whose <g, R> alone is a culprit's.

        Of n loud tokens, alike and orthogonal, each has ||g|| = sqrt(<g, R>), and its bound is 1 / sqrt(n) of that.
        """
        task, named = self.task, self.result.culprits
        found = by_share(task, shares, named)
        found += beside_louder(task, shares, named, found)
        if self._spikes_beside(shares, found):
            found += weighed(task, shares, named, found)
        if leaves_much(shares, found):
            more = by_value(task, shares.least, task.culprit_norm**2, [*named, *found], shares.square**-0.5)
            found += [] if leaves_much(shares, found + more) else more
        return found

    def _spikes_beside(self, shares: ShareMap, candidates: list[Span]) -> bool:
        """Whether the rest seems to spike without these: <rest, R> over the square of half the threshold."""
        rest = shares.square - carried_by(self.task, shares, candidates)[0]
        return rest > (self.task.reference / 2) ** 2

    def _is_spread(self, shares: ShareMap, candidates: list[Span]) -> bool:
        """Whether all spans that may be culprits leave most of R to others. Never while a token is to be proved."""
        if self.task.spike.threshold is None or any(candidate.norm == 0 for candidate in candidates):
            return False
        if not leaves_much(shares, candidates):
            return False
        much = carried(shares, candidates)
        self.result.stop_reason = f"the spike is spread: all spans that may be culprits carry {much:.0%} of it"
        self.note("share", "measured", self.result.stop_reason)
        return True

    def _is_explained_without(self, more: list[Span]) -> bool:
        """Measure the norm without what is named and these as well: whether it is under the threshold.

        False where the search may not cost as much, or these are most of the batch.
        """
        task, named, threshold = self.task, self.result.culprits, self.task.spike.threshold
        num_tokens = sum(span.size for span in [*named, *more])
        if threshold is None or not task.can_afford(backwards=self.prober.step.num_micro_batches, is_certificate=True):
            return False
        if num_tokens > MOST_OF_BATCH * task.spike.num_tokens:
            return False
        self.prober.compute_without(tokens_of([*named, *more]))
        norm = self.prober.space.norm()
        self.note("residual", "measured", f"without {len(named)} culprits and {len(more)} more like them", norm)
        return norm <= threshold

    def _settle(self) -> None:
        """Where the rest still spikes, or much of the batch is named, keep only what its loss pulls more than others.

        The loudest of a batch that is too large as a whole are pulled as all are.
        """
        result, threshold = self.result, self.task.spike.threshold
        certificate = result.certificate
        if not result.culprits or threshold is None or self.others is not None or self.is_explained_by_more:
            return
        if certificate is None:
            certificate = result.certificate = self.task.certify(result.tokens)
        rest, is_explained = certificate.norm_after, certificate.verdict == "explained"
        if rest is None or not math.isfinite(rest) or not (is_explained or rest > threshold):
            return
        pairs = zip(result.culprits, stand_out(self.task, result.culprits), strict=True)
        kept = [culprit for culprit, is_singled_out in pairs if is_singled_out]
        num_alike = sum(culprit.size for culprit in result.culprits if culprit not in kept)
        if is_explained and num_alike <= MOST_OF_BATCH * self.task.spike.num_tokens:
            return
        num_probes = self.prober.step.num_micro_batches if kept else 0
        if len(kept) < len(result.culprits) and self.task.can_afford(backwards=num_probes, is_certificate=True):
            result.rest, self.alone, result.is_cut, result.num_more, result.more_norm = None, None, False, 0, None
            result.culprits, result.certificate = kept, self.task.certify(tokens_of(kept))
            why = "without the culprits the batch is still too large" if kept else "no token stands out of the others"
            result.stop_reason = f"the spike is spread: {why}"
            self.note("share", "measured", result.stop_reason, rest)

    def _is_in_parts(self) -> bool:
        """Whether a part of the gradient passes through no token. If so, the tokens' own part is searched from here."""
        parts = split_off(self.task)
        if parts is None:
            return False
        self.direction, self.others, source = parts
        self.scale, self.result.culprits, self.result.certificate, self.alone = 1.0, [], None, None
        self._blame(source, source.numbers["others_norm"])
        if (source.numbers["tokens_norm"] or 0.0) < self.task.reference:
            self.result.certificate = nothing_found(self.task, source.reason)
        return True

    def _is_the_backward_s(self, shares: ShareMap) -> bool:
        """Whether the gradient is not the derivative of the tokens' log-probs. If so, no token is named."""
        is_asked = self.direction is self.task.gradient and shares.carries_else and self.result.source is None
        found = doubt_backward(self.task, shares) if is_asked else None
        if found is None:
            return False
        self._blame(*found)
        self.result.culprits = []
        self.result.certificate = nothing_found(self.task, found[0].reason)
        return True

    def _blame(self, source: StepCause, norm: float | None) -> None:
        self.result.source, self.result.stop_reason = source, source.reason
        self.note("others", "measured", source.reason, norm)

    def _trace_non_finite(self, goes_on: bool) -> bool:
        """Name what made a NaN or inf; returns whether the gradient without it is finite, and is to be searched.

        A coefficient that is not finite names its token, with no forward at all.
        """
        candidates, most = non_finite(self.task), self.task.max_culprits
        if candidates:
            self.note("coefficients", "culprit", f"{len(candidates)} spans have a coefficient that is not finite")
            for candidate in candidates[:most]:
                culprit = replace(candidate, norm=math.nan, threshold=self.task.culprit_norm, is_exact=True)
                self.result.culprits.append(culprit)
        else:
            why = "all coefficients are finite, so it was the backward that made the gradient non-finite"
            self._fall_back(why, is_allowed=True)
        if candidates or self.result.culprits:
            self.is_going_on = goes_on
            self.certify()
        self.cut(len(candidates) - most)
        found = self.result.certificate
        is_open = found is not None and found.verdict == "not_explained" and math.isfinite(found.norm_after or 0.0)
        return is_open and goes_on and not self.result.exhausted and 0 < len(self.result.culprits) < most

    def _count_more(self) -> None:
        """No more culprits may be named, and the rest still spikes: count what else there is, by shares along it.

        Where nothing else singles the culprits out, a pass without all of them tells whether they explain the spike.
        """
        shares = self._measure(number=1)
        more = [] if shares is None or not shares.is_trusted else self._spans(shares)
        if more and not all(stand_out(self.task, self.result.culprits)):
            self.is_explained_by_more = self._is_explained_without(more)
        self.cut(len(more), math.hypot(*(candidate.norm for candidate in more)) if more else None)

    def _look_for_hidden(self) -> None:
        """The sketch finds what shares cannot see: tokens that cancel each other or are orthogonal to R."""
        found = sketch(self.task, self.result.culprits)
        self.result.path += found.path
        if found.exhausted:
            self._stop_exhausted()
            return
        room = self.task.max_culprits - len(self.result.culprits)
        self.result.culprits += found.culprits[:room]
        self.alone = None
        if found.culprits:
            self.certify()
        else:
            self.result.stop_reason = "no token, segment or sequence (else) stands out: the spike is spread"

    def _fall_back(self, why: str, is_allowed: bool) -> None:
        """Bisection, if that is allowed; ``why`` there are no shares to go by."""
        self.result.stop_reason = why
        if is_allowed:
            self.note("bisect", "measured", why)
            found = bisect(self.task)
            self.result.path += found.path
            # bisection names tokens over the published threshold per token, which loud healthy tokens pass as well
            loud = [culprit for culprit in found.culprits if not culprit.norm < self.task.culprit_norm]
            self.result.culprits += apart(self.result.culprits, loud)
            self.result.exhausted, self.result.certificate, self.alone = found.exhausted, None, None
            self.result.stop_reason = f"{why}; bisection: {found.stop_reason}"

    def _stop_exhausted(self) -> None:
        self.result.exhausted = True
        self.result.stop_reason = self.task.limit.words

    # ---- what is named, and the gradient that is left

    def name(self, candidates: list[Span]) -> bool:
        """Name the candidates that are culprits, loudest first; returns whether any was.

        A hint, whose bound is too low to name it, needs a backward of its own. So do the first few others, for their
        exact norm. The rest is named by its bound. Backwards for hints still to come are kept back from the budget.
        """
        num_misses, num_verified, has_named, most = 0, 0, False, most_verified(self.task, self.norm, candidates)
        num_hints = sum(candidate.norm < least_bound(self.task, self.norm, candidate) for candidate in candidates)
        are_few = len(candidates) - num_hints <= _FEW_TO_MEASURE
        runs_again = len(candidates) - num_hints <= most and self._is_subtracted(candidates)
        for candidate in candidates:
            # a sequence takes the place of its tokens that were named before
            within = [c for c in self.result.culprits if set(c.tokens) < set(candidate.tokens)]
            if len(self.result.culprits) - len(within) >= self.task.max_culprits:
                break
            if not apart([culprit for culprit in self.result.culprits if culprit not in within], [candidate]):
                continue
            least = least_bound(self.task, self.norm, candidate)
            is_hint = candidate.norm < least
            num_hints -= is_hint
            if (is_hint or num_verified < most) and self._can_verify(is_hint or are_few, is_hint, num_hints):
                num_verified += not is_hint
                culprit = self.verify(candidate)
            elif is_hint:
                continue
            else:
                culprit = replace(candidate, threshold=least)
            if not culprit.norm < culprit.threshold:  # NaN is a culprit, too
                self.add_up(culprit, is_alone=not within, runs_again=runs_again)
                self.result.culprits = [c for c in self.result.culprits if c not in within] + [culprit]
                has_named = True
            elif is_hint:
                num_misses += 1
                if num_misses >= _MAX_MISSES:
                    break
        return has_named

    def _can_verify(self, is_wanted: bool, is_hint: bool, num_hints: int) -> bool:
        """Whether one more backward may be spent; one that only measures many only if that leaves another round."""
        if is_wanted or not self.is_going_on:
            return self.task.can_afford(backwards=1 + (0 if is_hint else num_hints))
        num = self.prober.step.num_micro_batches
        return self.task.can_afford(forwards=2 * num + MOST_TO_SETTLE, backwards=1 + num_hints + num)

    def _is_subtracted(self, candidates: list[Span]) -> bool:
        """Whether the certificate will subtract several culprits' own gradients, and nothing but tokens makes them."""
        task = self.task
        if len(candidates) == 1 or self.others is not None or self._has_beside():
            return False
        num_tokens = sum(span.size for span in [*candidates, *self.result.culprits])
        return is_subtracted(self.prober, task.spike.grad_norm, task.spike.threshold, num_tokens)

    def _has_beside(self) -> bool:
        """Whether on any rank a part of the loss passes through no token, which each probe would add."""
        own = self.prober.step.recorded(0).beside_coefficient is not None
        return self.prober.ranks.sum([float(own)])[0] > 0

    def add_up(self, culprit: Span, is_alone: bool, runs_again: bool) -> None:
        """Add the culprit's gradient in ``.grad`` to ``alone``, or give that sum up if one of its parts is unknown.

        The first one's backward ``runs_again``, if wanted, which tells the certificate how far off the sum may be.
        """
        prober, known = self.prober, self.alone
        is_of_use = culprit.is_exact and is_alone and self.task.unit == 1.0  # else the certificate recomputes
        if not is_of_use or (self.result.culprits and known is None):
            self.alone = None
        elif known is not None:
            prober.add(known.gradient)
            self.alone = replace(known, gradient=prober.space.keep(), square=known.square + culprit.norm**2)
        else:
            self.alone = Alone(prober.space.keep(), culprit.norm, culprit.norm**2)
            if runs_again and self.task.can_afford(backwards=1):
                self.alone.difference = backward_again(prober, culprit.tokens, self.alone.gradient)

    def verify(self, candidate: Span) -> Span:
        culprit = verify(self.task, candidate, self.task.culprit_norm)
        where = f"{candidate.span} of rank {candidate.rank}, micro-batch {candidate.micro_batch}"
        where = f"{where}, from its token {candidate.start}"
        note = where if candidate.norm else f"{where}; proposed by its coefficient"
        verdict, size = "under" if culprit.norm < culprit.threshold else "culprit", len(candidate.tokens)
        self.note("verify", verdict, note, culprit.norm, num_tokens=size, threshold=culprit.threshold)
        return culprit

    def certify(self) -> bool:
        """Certify what is named so far; returns whether the search is over. What is left becomes the next direction."""
        if self._spikes_without():
            return False
        task = self.task
        alone, self.alone = self.alone if self.others is None else None, None
        self.direction, self.result.rest = task.gradient, None  # frees the last residual, before the next one is made
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
        self.result.rest = self.direction
        if certificate.verdict == "explained" and self.others is None:
            self._leave_to_rows(certificate)
        return is_done

    def _leave_to_rows(self, certificate: Certificate) -> None:
        """Where rows as a whole are culprits: let go of the tokens beside them that the spike does not need.

        With those back in, the norm is at most that of the rest, with its error, plus the tokens' own. Where that is
        under the threshold, one probe more measures it.
        """
        task, named = self.task, self.result.culprits
        rows = [culprit for culprit in named if culprit.span == "sequence"]
        beside = [culprit for culprit in named if culprit.span != "sequence"]
        sizes = math.fsum(culprit.norm if culprit.is_exact else math.inf for culprit in beside)
        bound = (certificate.error_bound or 0.0) + 2 * unit_of(self.prober) * sizes
        most = (certificate.norm_after or 0.0) + bound + sizes
        if not rows or not beside or not most < (task.spike.threshold or 0.0):
            return
        holders = sorted({culprit.micro_batch for culprit in beside})
        if self._has_beside() or task.unit != 1.0 or not task.can_afford(backwards=len(holders), is_certificate=True):
            return
        self.prober.compute_only(tokens_of(beside), holders)
        self.prober.add(self.direction)
        norm = self.prober.space.norm()
        verdict, reason = judge(norm, bound, task.spike.threshold)
        self.note("residual", verdict, f"with {len(beside)} loud spans beside the rows back in", norm)
        if verdict != "explained":  # too near to say
            return
        self.result.culprits = rows
        after = replace(certificate, norm_after=norm, error_bound=bound, verdict=verdict, reason=reason)
        self.result.certificate = after
        self.direction = self.result.rest = self.prober.space.keep()

    def _measure_by_difference(self) -> None:
        """The only culprit's own gradient, with no backward: the spike less what the certificate left in ``.grad``."""
        space, (culprit,) = self.prober.space, self.result.culprits
        rest = space.keep()
        self.prober.add(self.task.gradient, alpha=1.0 / self.task.scale)
        self.prober.add(rest, alpha=-1.0)
        self.result.culprits = [measured(self.task, culprit, self.task.culprit_norm)]
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
        alone = named[0].norm if len(named) == 1 else space.norm(self.alone.gradient)
        norm = max(square * (1 - 2 * math.fsum(culprit.share or 0.0 for culprit in named)) + alone**2, 0.0) ** 0.5
        if norm < max(_BY_FAR * threshold, _COARSE * task.spike.grad_norm, _COARSE * alone):
            return False
        space.clear()
        self.prober.add(task.gradient, alpha=1.0 / task.scale)
        self.prober.add(self.alone.gradient, alpha=-1.0)
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


def auto(task: Task) -> SearchResult:
    """Find all culprits, certified, in up to four rounds; then the sketch, or bisection if shares are of no use.

    ``.grad`` is overwritten, weights are moved and restored bit for bit.
    """
    return _AutoSearch(task).run(_MAX_ROUNDS, is_last_resort_allowed=True)


def share(task: Task) -> SearchResult:
    """One round of shares along the gradient, and its certificate."""
    return _AutoSearch(task).run(1, is_last_resort_allowed=False)
