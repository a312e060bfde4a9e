# SPDX-License-Identifier: Apache-2.0
"""The default search: shares show who may be a culprit, backwards of their own prove it, a certificate ends it.

A round takes two forwards of each micro-batch (the shares of all tokens of all ranks), a backward for each of a few
candidates, and the certificate. If the rest still spikes, the next round searches along that rest, which the
certificate left in ``.grad``. Where shares are not exact, the last resort is the published bisection.
docs/method.md, sections 3 and 4.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..core.certificate import CERTAIN
from ..core.gradients import Gradient
from ..record import PathEntry, StepCause
from .batch import is_spread, keep_culprits
from .bisect import bisect
from .candidates import MAX_MISSES, drop_overlapping, find_non_finite, propose, sum_products
from .few import few_to_measure, measure_last
from .overflow import rescale_task, to_training_unit
from .share import FAR, ShareMap, ShareMeasurement
from .step_causes import auxiliary_sizes, certify_nothing, doubt_backward, split_off
from .task import SearchResult, Span, Task, tokens_of, verify

_ODD = 0.15  # of closure: a gradient in half precision is mostly off by less
_MOST = 0.75  # of the threshold, or of what is missing: the rest needs no reading, since norms are off by what is loud
_UNLIKELY = 2.0  # times what micro-batches' norms say that they carry


class _AutoSearch:
    """The state of one search. Its direction R is the gradient at first, then the gradient without the culprits."""

    def __init__(self, task: Task):
        self.task, self.prober = task, task.prober
        self.result = SearchResult()
        self.direction: Gradient = task.gradient
        self.scale = task.scale
        self.square = task.square
        """||R||^2; None where it was not measured yet."""
        self.others: Gradient | None = None
        """The part of the gradient that passes through no token, if it is as large as a culprit."""
        self.prober.sizes = dict(enumerate(task.increments or ()))
        self.is_precise = self.prober.step.dtype == torch.float32  # so that R is the function's own gradient
        self._is_split = False  # whether a part that passes through no token was looked for

    def run(self, is_full: bool) -> SearchResult:
        """Search in rounds until what is named explains the spike, then by a last resort; then ask about the batch.
        Unless ``is_full`` there is one round, along the gradient, and no last resort."""
        is_finite = math.isfinite(self.task.spike.grad_norm)
        is_to_search = is_finite or self._trace_non_finite(is_full)
        if is_to_search and not self._rounds(0 if is_finite else 1, is_full):
            self._last_resort(is_full)
        self._drop_if_batch_at_fault()
        if self.others is None:
            measure_last(self.task, self.result, self._verify)
        return self.result

    # ---- the stages

    def _rounds(self, first: int, is_full: bool) -> bool:
        """Search in rounds. Returns whether the search is over; if not, shares along R name no more culprits."""
        if first == 0 and any(auxiliary_sizes(self.task)) and self._split_off() and self.result.certificate is not None:
            return True
        for number in itertools.count(first) if is_full else (first,):
            shares = self._measure(number)
            if shares is not None and self._is_partly_without_tokens(shares):
                if self.result.certificate is not None:
                    return True
                shares = self._measure(number)  # along the tokens' own part
            if shares is None:
                self._stop(self.task.limit.words, exhausted=True)
                return True
            self.shares = shares
            candidates = propose(self.task, shares, self.result.culprits)
            is_open = not shares.is_trusted or any(not candidate.norm for candidate in candidates)  # to be proved
            if not is_open and is_spread(self.task, shares, candidates):
                self._stop("the spike is spread: all spans that may be culprits leave most of it to others")
                self._note("share", "measured", self.result.stop_reason)
                return True
            if not self._name(candidates, shares):
                return False
            if self._certify(goes_on=is_full):
                return True
            if len(self.result.culprits) >= self.task.max_culprits:
                others = drop_overlapping(self.result.culprits, candidates)
                more = [span.norm for span in others if span.norm >= span.threshold]
                self._cut(len(more) * shares.is_exact, math.hypot(*more) if more and shares.is_exact else None)
                return True
        return False

    def _measure(self, number: int) -> ShareMap | None:
        """Measure shares along R in the loudest micro-batch, in those that account for most of what is missing, in the
        others that may hold a culprit.

        Returns:
            The shares; None if the search may not cost as much.
        """
        sizes = [self.prober.sizes.get(index, math.inf) for index in range(self.prober.step.num_micro_batches)]
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        part = order[: max(sizes.count(math.inf), 1)]  # where culprits were, there may be more
        shares = None
        for coverage in (_MOST, math.inf, math.inf):
            shares = self._measure_of(part, shares)
            if shares is None:
                return None
            unread = [(index, sizes[index]) for index in order if index not in shares.seen]
            part = self._to_read(shares, unread, coverage)
            if not part:
                break
        if number == 0:
            self.result.shares = shares
        return shares

    def _to_read(self, shares: ShareMap, unread: list[tuple[int, float]], coverage: float) -> list[int]:
        """Return which of the unread micro-batches to read next, given with their norms, loudest first: those that
        account for this part of what is missing of R."""
        missing = abs(1 - shares.closure)  # over 1: something takes it back
        least = (_MOST * self.task.reference) ** 2
        error = CERTAIN * shares.noise if self.is_precise else _ODD
        if not unread or missing < error or missing * shares.square < least or shares.unseen * shares.square < least:
            return []
        loud = [(index, norm) for index, norm in unread if norm >= self.task.culprit_norm]
        if not loud and missing < _UNLIKELY * shares.unseen:
            return []  # as much as ordinary micro-batches carry
        sums = itertools.accumulate(norm**2 for _, norm in loud)
        count = 1 + sum(carried < coverage * missing * shares.square for carried in sums)
        return [index for index, _ in loud[:count] or unread]

    def _measure_of(self, micro_batches: list[int], known: ShareMap | None) -> ShareMap | None:
        task = self.task
        if not task.can_afford(forwards=2 * (len(micro_batches) + (known is None))):
            return None
        readouts = self.prober.ranks.run_local_synced(lambda: task.readouts(self.result.culprits))
        sizes = [size for _, size in sorted(self.prober.sizes.items())]
        given = readouts, self.direction, self.scale, micro_batches, known, sizes, self.square
        shares = ShareMeasurement(self.prober, *given).run()
        self.square = shares.square
        seen = sorted(shares.seen)
        is_part = len(seen) < self.prober.step.num_micro_batches
        which = f"micro-batches {seen} alone" if is_part else "all micro-batches"
        note = f"the shares of {which} add up to {shares.closure:.4f} (+- {shares.closure_error:.2g})"
        if math.isnan(shares.closure):
            note = f"the shares of {which} are not finite: rounding undid the move, or outputs overflowed"
        self._note("share", "measured" if shares.is_trusted else "untrusted", note, shares.square**0.5)
        return shares

    def _name(self, candidates: list[Span], shares: ShareMap) -> bool:
        """Name the candidates that are culprits, loudest first, while the spike needs them; returns whether any was.

        An exact bound is a proof. Others take a backward of their own, until two in a row are no culprits.
        """
        result, num_misses, has_named = self.result, 0, False
        # of ||R||^2, if the culprits' gradients are orthogonal to the rest, and how far what was read is off
        left, off = shares.square, max(shares.noise, abs(1 - shares.closure))
        error = off * left if shares.is_exact else math.inf
        is_along = self.direction is self.task.gradient
        for candidate in candidates:
            is_proved = shares.is_exact and candidate.norm >= candidate.threshold
            most = self.task.reference / (2 if is_proved else 1)  # a proof costs no backward
            is_needed = abs(left) + error >= most**2
            is_spike = (candidate.norm if is_proved else candidate.threshold) >= self.task.reference  # by itself
            if not is_needed and not is_spike:
                continue
            # a sequence takes the place of its tokens that were named before
            others = [culprit for culprit in result.culprits if not set(culprit.tokens) < set(candidate.tokens)]
            if len(others) >= self.task.max_culprits or num_misses == MAX_MISSES:
                break
            if not drop_overlapping(others, [candidate]):
                continue
            if is_proved:
                culprit = candidate
            elif self.task.can_afford(backwards=1):
                culprit = self._verify(candidate)
            else:
                continue
            is_culprit = not culprit.norm < culprit.threshold  # NaN is one, too
            num_misses = 0 if is_culprit else num_misses + 1
            if is_culprit:
                result.culprits, has_named = [*others, culprit], True
                if shares.is_exact or not is_along:
                    left -= sum_products(self.task, shares, [candidate])
                else:  # shares prove nothing, so backwards measured all that are named
                    left, error = left - (culprit.share or 0.0) * shares.square, 0.0
        return has_named

    def _verify(self, candidate: Span) -> Span:
        culprit = verify(self.task, candidate, max(self.task.culprit_norm, candidate.threshold))
        where = f"{candidate.span} of rank {candidate.rank}, micro-batch {candidate.micro_batch}"
        hint = "" if candidate.norm else "; proposed by its coefficient"
        note = f"{where}, from its token {candidate.start}{hint}"
        verdict = "under" if culprit.norm < culprit.threshold else "culprit"
        self._note("verify", verdict, note, culprit.norm, num_tokens=candidate.size, threshold=culprit.threshold)
        return culprit

    def _certify(self, goes_on: bool = False) -> bool:
        """Certify what is named so far; returns whether the search is over. The residual becomes the next direction."""
        task, result, space = self.task, self.result, self.prober.space
        self.direction, result.rest = task.gradient, None  # frees the last residual, before the next one is made
        certificate = result.certificate = task.certify(result.tokens, goes_on, **few_to_measure(task, result.culprits))
        if certificate.method == "subtract":  # which measures no micro-batch
            for token in result.tokens:
                self.prober.sizes.pop(token.micro_batch, None)
        self._note("residual", certificate.verdict, certificate.reason, certificate.norm_after)
        result.stop_reason = certificate.reason
        is_done = certificate.verdict == "explained" or not math.isfinite(certificate.norm_after or 0.0)
        norm = None if certificate.method == "none" else certificate.norm_after
        if self.others is not None and not is_done:
            self.prober.add(self.others, alpha=-1.0)
            norm = space.norm()
            is_done = norm < task.reference
        self.square = None if norm is None else norm**2
        self.direction = result.rest = space.keep()
        self.scale = 1.0
        return is_done

    def _cut(self, num_more: int, norm: float | None = None) -> None:
        """Record that ``max_culprits`` ended the search, with this many more spans of together this norm at least."""
        result, most = self.result, self.task.max_culprits
        result.is_cut, result.num_more, result.more_norm = True, num_more, norm
        more = f", and at least {num_more} more are left" if num_more else ""
        result.stop_reason = f"search.max_culprits={most} are named{more}"

    def _last_resort(self, is_allowed: bool) -> None:
        """Bisect where shares are not exact; else say that the spike is spread."""
        shares = self.shares
        if not self.result.culprits and self._is_backward_altered(shares):
            return
        if not is_allowed:
            self._stop("shares name no more culprits, and the rest still spikes")
        elif shares.is_exact:
            self._stop("the spike is spread: no (other) token, segment or sequence is larger than the rest")
        else:
            self._bisect("shares read in half precision name no more culprits")

    def _bisect(self, why: str) -> None:
        result = self.result
        self._note("bisect", "measured", why)
        found = bisect(self.task)
        result.path += found.path
        # bisection names tokens over the published threshold per token, which loud healthy tokens pass as well
        loud = [culprit for culprit in found.culprits if not culprit.norm < self.task.culprit_norm]
        result.culprits, result.certificate = [*result.culprits, *drop_overlapping(result.culprits, loud)], None
        self._stop(f"{why}; bisection: {found.stop_reason}", found.exhausted)

    def _drop_if_batch_at_fault(self) -> None:
        """Take back what is named where the batch is at fault."""
        task, result = self.task, self.result
        if not result.culprits or self.others is not None:
            return
        certificate = result.certificate = result.certificate or task.certify(result.tokens)
        kept = keep_culprits(task, result.culprits, certificate)
        if len(kept) == len(result.culprits):
            return
        kept = kept if task.can_afford(backwards=self.prober.step.num_micro_batches, is_certificate=True) else []
        result.culprits, result.certificate, result.rest = kept, task.certify(tokens_of(kept)), None
        result.is_cut, result.num_more, result.more_norm = False, 0, None
        why = "without the culprits the batch is still too large" if kept else "no token is larger than the others"
        self._stop(f"the spike is spread: {why}", result.exhausted)
        self._note("share", "measured", result.stop_reason, certificate.norm_after)

    # ---- causes that are not tokens

    def _is_partly_without_tokens(self, shares: ShareMap) -> bool:
        """Return whether shares do not add up because a part of the gradient passes through no token, or through a
        backward that scales it. The cause is then noted; where tokens have a part to search, ``direction`` is that."""
        is_odd = shares.is_exact and not shares.unseen and abs(1 - shares.closure) > _ODD
        if not is_odd or self._is_split:
            return False
        return self._split_off() or self.is_precise and self._is_backward_altered(shares)  # else rounding may turn it

    def _split_off(self) -> bool:
        """Search the tokens' part of the gradient alone if the rest is as large as a culprit; return whether it is."""
        self._is_split = True
        parts = split_off(self.task)
        if parts is None:
            return False
        self.direction, self.others, source = parts
        self.scale, self.square, self.result.culprits, self.result.certificate = 1.0, None, [], None
        self._blame(source, source.numbers["others_norm"])
        if (source.numbers["tokens_norm"] or 0.0) < self.task.reference:
            self.result.certificate = certify_nothing(self.task, source.reason)
        return True

    def _is_backward_altered(self, shares: ShareMap) -> bool:
        """Return whether the gradient is not the derivative of the tokens' log-probs. If so, no token is named."""
        is_far = not 1 / FAR <= shares.closure <= FAR
        is_asked = is_far and self.direction is self.task.gradient and self.result.source is None
        found = doubt_backward(self.task, shares) if is_asked else None
        if found is None:
            return False
        self._blame(*found)
        self.result.culprits = []
        self.result.certificate = certify_nothing(self.task, found[0].reason)
        return True

    def _blame(self, source: StepCause, norm: float | None) -> None:
        self.result.source = source
        self._stop(source.reason)
        self._note("others", "measured", source.reason, norm)

    def _trace_non_finite(self, goes_on: bool) -> bool:
        """Name the source of a NaN or inf; returns whether the gradient without it is finite, and is to be searched."""
        candidates, most, result = find_non_finite(self.task), self.task.max_culprits, self.result
        if not candidates:
            self._bisect("all coefficients are finite, so it was the backward that made the gradient non-finite")
        else:
            self._note("coefficients", "culprit", f"{len(candidates)} spans have a coefficient that is not finite")
            known = partial(replace, norm=math.nan, threshold=self.task.culprit_norm, is_exact=True)
            result.culprits = [known(candidate) for candidate in candidates[:most]]
        if result.culprits:
            self._certify(goes_on)
        found = result.certificate
        is_explained = found is not None and found.verdict == "explained"
        if len(candidates) > most or (len(candidates) == most and not is_explained):
            self._cut(len(candidates) - most)
        is_open = found is not None and found.verdict == "not_explained" and math.isfinite(found.norm_after or 0.0)
        return is_open and goes_on and not result.exhausted and 0 < len(result.culprits) < most

    def _stop(self, why: str, exhausted: bool = False) -> None:
        self.result.stop_reason, self.result.exhausted = why, exhausted

    def _note(self, phase: str, verdict: str, note: str, norm: float | None = None, **more: Any) -> None:
        self.result.path.append(PathEntry(phase, verdict=verdict, norm=norm, note=note, **more))


def auto(task: Task) -> SearchResult:
    """Find all culprits, certified, in rounds; then by bisection if shares are not exact.

    ``.grad`` is overwritten, weights are moved and restored bit for bit.
    """
    found = _AutoSearch(task).run(is_full=True)
    norm = 0.0 if found.certificate is None else found.certificate.norm_after or 0.0
    is_open = found.culprits and task.unit == 1.0 and not math.isfinite(norm)
    other = rescale_task(task, found.culprits) if is_open else None
    if other is None:
        return found
    more = to_training_unit(other, auto(other))  # without what is not finite itself, the norm overflows
    more.path = found.path + more.path
    return more


def share(task: Task) -> SearchResult:
    """Search one round of shares along the gradient, and certify it."""
    return _AutoSearch(task).run(is_full=False)
