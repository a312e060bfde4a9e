# SPDX-License-Identifier: Apache-2.0
"""What the gradient norm is without the culprits: measured, with a bound on its error.

Three ways, the cheapest that decides.

*Subtract*: R = G - g_C, with g_C from backwards of the culprits alone. These run twice, the second time times -3/4, so
that every product has another mantissa and is rounded anew. What the two do not cancel is the error: rounding in
whatever format kernels round in, kernels that do not repeat, and gradient that passes through no token. It is some 3e-7
of g_C in float32 and some 0.6 % in bfloat16. For a spike of forty times the healthy norm the latter is too much.

*Swap*: R = G - (the micro-batches that hold culprits) + (the same without the culprits), for louder spikes. Where
kernels repeat bit for bit, what is recomputed cancels, and the error is accumulation's alone, a few units of rounding
of the spike. Where they do not (atomics in the backward of attention and of the embedding), it is as large as replays
of these micro-batches differ. For a spike of a thousand times the healthy norm that may be more than the healthy norm,
so these micro-batches are replayed twice, and the difference is part of the bound.

*Recompute*: run every micro-batch without the culprits. The error is that of a healthy gradient, however large the
spike was. We recompute where the bounds of the others do not decide, where it costs no more, and where G is not finite.
The bound is a tenth of the residual, more than two passes of any kernels differ by. Where that does not decide, two
replays tell how far they differ.

The difference of two replays is one draw: kernels that do not repeat may have erred more in training than in both. So
the bound takes three times the difference, and, once there is any, one unit in the last place of bfloat16 of what was
replayed; no backward holds its gradients in a coarser format. Where culprits are subtracted that unit is always there,
in float32 as 2^-16 of them: coarser rounding shows in the difference.

Training's own sums over ranks may be coarser still (``reduce_dtype`` of half precision, or FSDP1 that adds up
micro-batches before it reduces them). What that leaves of a spike is in no replay, so it is part of every bound.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..record import Certificate
from .gradients import Gradient
from .probe import Prober
from .selection import Token

_DRAWS = 3.0  # the difference of two replays is one draw; another is hardly ever larger than this many times it
_UNIT = 2.0**-8  # of bfloat16
_FINE = 2.0**-16  # 256 units of float32; the two backwards of what is subtracted differ by some 5
_AGAIN = 0.75  # of the culprits, with the opposite sign, the second time: a power of two would be rounded alike
_CLEAN = 0.1  # of a residual: with more error than this, it is no direction to search along
_APART = 0.1  # of a gradient without culprits: two passes of it differ by less, or nothing could be trained


def judge(norm_after: float, error_bound: float, threshold: float | None, was_finite: bool = True) -> tuple[str, str]:
    """Decide what a residual norm proves.

    Args:
        norm_after: norm without the culprits.
        error_bound: largest error of ``norm_after``.
        threshold: the norm from which a step counts as a spike; None on a rehearsal, and in the warm-up.
        was_finite: whether the step's own norm was; one that was not spikes without a threshold, too, and is explained
            where the rest is finite.

    Returns:
        (verdict, reason): ``explained`` or ``not_explained`` only when the bound is below half the distance to the
        threshold, else ``undecided``.
    """
    if threshold is None and was_finite:
        return "undecided", "a rehearsal: nothing spiked, so there is no threshold to come under"
    if not math.isfinite(norm_after):
        return "not_explained", "without the culprits the gradient is still not finite"
    if threshold is None:
        return "explained", "without the culprits the gradient is finite"
    if not error_bound < abs(threshold - norm_after) / 2:
        return "undecided", "the measurement's error bound is not below half the distance to the threshold"
    if norm_after < threshold:
        return "explained", "without the culprits the norm is under the threshold"
    return "not_explained", "without the culprits the norm is still over the threshold"


def is_subtracted(prober: Prober, norm_before: float, threshold: float | None, num_tokens: int) -> bool:
    """Whether so many culprit tokens' own gradient, once known, tells the norm without them closely enough."""
    if threshold is None:
        return True
    unit = _FINE if prober.step.compute_dtype == torch.float32 else _UNIT
    additions = prober.step.num_micro_batches + num_tokens + 4
    return (8 * unit + additions * prober.space.rounding + prober.reduction_error) * norm_before < threshold / 4


def certify(
    prober: Prober,
    spike: Gradient,
    scale: float,
    norm_before: float,
    threshold: float | None,
    culprits: list[Token],
    alone: Gradient | None = None,
    can_afford: Callable[[int], bool] = lambda _: True,
    goes_on: bool = False,
) -> Certificate:
    """Measure the step's gradient norm without the culprits.

    Args:
        prober: the step; its ``.grad`` is overwritten and left holding the residual gradient.
        spike: the training gradient set aside, holding ``scale`` times the true one.
        scale: the factor that clipping put on ``spike``; in (0, 1].
        norm_before: the norm verl measured before clipping.
        threshold: the trigger's threshold on the norm; None on a rehearsal, and in the warm-up.
        culprits: tokens to leave out.
        alone: the culprits' gradient from backwards of their own, where that is known; emptied, to free its memory.
        can_afford: whether so many probes more may be made; one pass over the micro-batches always may.
        goes_on: whether the search goes on where the norm is not under the threshold, so that it need not be decided.
    """
    was_finite = math.isfinite(norm_before)
    if not culprits:
        verdict, reason = judge(norm_before, 0.0, threshold, was_finite)
        reason = reason if threshold is None and was_finite else "no culprit was found, so nothing is explained"
        return Certificate(norm_before, norm_before, 0.0, threshold, "none", verdict, reason)
    removal = _Removal(prober, spike, scale, norm_before, threshold, culprits, can_afford)
    found = removal.measure(alone or []) if was_finite else None
    (alone or []).clear()
    norm_after, error_bound, difference, method = found or _recompute(prober, culprits, threshold, can_afford, goes_on)
    verdict, reason = judge(norm_after, error_bound, threshold, was_finite)
    return Certificate(norm_before, norm_after, error_bound, threshold, method, verdict, reason, difference)


_Measured = tuple[float, float, float | None, str]
"""The norm without the culprits, a bound on its error, by how much replays differed, and the method."""


@dataclass(frozen=True)
class _Removal:
    """Taking the culprits out of the step's gradient; the arguments are those of :func:`certify`."""

    prober: Prober
    spike: Gradient
    scale: float
    norm_before: float
    threshold: float | None
    culprits: list[Token]
    can_afford: Callable[[int], bool]

    def measure(self, alone: Gradient) -> _Measured | None:
        """By what decides and costs less than every micro-batch without the culprits; None where nothing does."""
        num_holders, num_micro_batches = len(self.holders), self.prober.step.num_micro_batches
        subtracts = is_subtracted(self.prober, self.norm_before, self.threshold, len(self.culprits))
        cost = ((1 if alone else 2) if subtracts else 3) * num_holders
        # where it does not decide, every micro-batch comes after it
        if cost >= num_micro_batches or not self.can_afford(cost + num_micro_batches):
            return None
        if subtracts:
            return self._subtract(alone)
        alone.clear()
        return self._swap()

    @property
    def holders(self) -> list[int]:
        """The micro-batches that hold culprits."""
        return sorted({token.micro_batch for token in self.culprits})

    def _subtract(self, alone: Gradient) -> _Measured | None:
        prober, space = self.prober, self.prober.space
        unit = _FINE if prober.step.compute_dtype == torch.float32 else _UNIT
        if not alone:
            prober.compute_only(self.culprits, self.holders)
            alone = space.keep()
        norm = space.norm(alone)
        prober.compute_only(self.culprits, self.holders, factor=-_AGAIN)
        space.scale(1.0 / _AGAIN)
        prober.add(alone)
        difference = space.norm()
        space.scale(_AGAIN / (1.0 + _AGAIN))  # what passes through no token: no part of the culprits' gradient
        prober.add(alone, alpha=-1.0)
        prober.add(self.spike, alpha=1.0 / self.scale)
        noise = _DRAWS * difference + unit * norm
        rounding = self._rounding(len(self.culprits) + 2, norm)
        return self._decided(space.norm(), rounding, noise, difference, "subtract")

    def _swap(self) -> _Measured | None:
        prober, space = self.prober, self.prober.space
        prober.compute((index, None) for index in self.holders)
        with_culprits = space.keep()
        norm = space.norm(with_culprits)
        prober.compute((index, None) for index in self.holders)
        prober.add(with_culprits, alpha=-1.0)
        difference = space.norm()
        noise = _DRAWS * difference + _UNIT * norm if difference > 0 else 0.0
        if self.threshold is not None and noise >= self.threshold / 2:
            return None  # no norm under the threshold could be told from it
        prober.compute_without(self.culprits, self.holders)
        rounding = self._rounding(len(self.holders) + 4, norm + space.norm())
        prober.add(with_culprits, alpha=-1.0)
        prober.add(self.spike, alpha=1.0 / self.scale)
        return self._decided(space.norm(), rounding, noise, difference, "swap")

    def _rounding(self, num_additions: int, norm: float) -> float:
        """Each addition, training's and so many with gradients of this norm, is off by a unit of what it gives, and
        each reduction over the ranks by its own."""
        num_micro_batches, reduced = self.prober.step.num_micro_batches, self.prober.reduction_error
        added = self.prober.space.rounding * ((num_micro_batches + 2) * self.norm_before + num_additions * norm)
        return added + reduced * (self.norm_before + norm)

    def _decided(
        self, norm_after: float, rounding: float, noise: float, difference: float, method: str
    ) -> _Measured | None:
        """What was measured; None where kernels do not repeat well enough to decide this way."""
        verdict, _ = judge(norm_after, rounding + noise, self.threshold)
        is_noisy = verdict == "not_explained" and noise > _CLEAN * norm_after  # and it is searched along next
        is_vague = verdict == "explained" and noise > norm_after and self.can_afford(self.prober.step.num_micro_batches)
        if self.threshold is not None and (verdict == "undecided" or is_noisy or is_vague):
            return None
        return norm_after, rounding + noise, difference, method


def _recompute(
    prober: Prober, culprits: list[Token], threshold: float | None, can_afford: Callable[[int], bool], goes_on: bool
) -> _Measured:
    space, num_micro_batches = prober.space, prober.step.num_micro_batches
    prober.compute_without(culprits)
    norm_after = space.norm()
    rounding = (num_micro_batches**2 * space.rounding + prober.reduction_error) * norm_after
    error_bound = rounding + _APART * norm_after
    is_decided = judge(norm_after, error_bound, threshold, was_finite=False)[0] != "undecided"
    is_open = goes_on and threshold is not None and norm_after >= threshold
    if not math.isfinite(norm_after) or is_decided or is_open or not can_afford(2):
        return norm_after, error_bound, None, "recompute"
    residual = space.keep()
    fullest = _fullest(prober, culprits)
    prober.compute_without(culprits, [fullest])
    first = space.keep()
    prober.compute_without(culprits, [fullest])
    prober.add(first, alpha=-1.0)
    difference = space.norm()
    space.put(residual)
    if difference == 0:
        return norm_after, rounding, difference, "recompute"
    # two draws differ by sqrt(2) of one, and independent ones of more micro-batches add up so
    noise = _DRAWS * difference * (num_micro_batches / 2) ** 0.5 + _UNIT * norm_after
    return norm_after, rounding + noise, difference, "recompute"


def _fullest(prober: Prober, culprits: list[Token]) -> int:
    """The micro-batch with most tokens left, which tells whether kernels repeat: one without any has no gradient."""
    step, ranks = prober.step, prober.ranks
    indices = range(step.num_micro_batches)
    tokens = ranks.sum(ranks.agree(lambda: [float(step.token_mask(index).sum()) for index in indices]))
    taken = Counter(token.micro_batch for token in culprits)
    return max(indices, key=lambda index: tokens[index] - taken[index])
