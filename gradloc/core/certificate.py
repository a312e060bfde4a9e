# SPDX-License-Identifier: Apache-2.0
"""Measure the gradient norm without the culprits, with a bound on the error.

In exact arithmetic all methods agree. In practice the spike G is large, the rest small, and G's rounding or the
kernels' noise may be larger than the rest. So there are three methods, and the cheapest one that decides is used:

- *subtract* the culprits' own gradients. The loudest one's backward runs again times -3/4, so that every product is
  rounded anew: both differ by about 3e-7 of its norm in float32, and by 0.6 % in bfloat16, which is too much for a
  spike of 40 healthy norms;
- *swap* the micro-batches that hold culprits for the same without them. These run twice, since they cancel exactly only
  if kernels repeat (atomics in the backward of attention and of the embedding do not);
- *recompute* all micro-batches without the culprits, if the others do not decide, cost more, or G is not finite.

docs/method.md, section 6, says how each bound is made, and why.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ..record import Certificate
from .gradients import Gradient
from .precision import UNITS
from .probe import Prober
from .selection import Token

CERTAIN = 3.0
"""Standard errors that count as beyond chance. The difference of two replays is one such error."""
REPLAY_TOLERANCE = 0.1
"""Largest relative error of a gradient. However badly kernels repeat, two passes over the same micro-batches differ by
less, or nothing could be trained. A residual with a larger error gives no direction to search along."""
_BF16_UNIT = UNITS[torch.bfloat16]  # no backward holds its gradients in a coarser format
_FP32_ERROR = 256 * UNITS[torch.float32]  # two backwards of the culprits differ by about 5 units
_SECOND = 0.75  # factor of the loudest culprit's second backward; a power of two would round alike


def verdict_of(
    norm_after: float, error_bound: float, threshold: float | None, was_finite: bool = True
) -> tuple[str, str]:
    """Decide what the norm without the culprits proves.

    Args:
        norm_after: norm without the culprits; may be NaN or inf.
        error_bound: largest error of ``norm_after``.
        threshold: the norm above which a step is a spike; None on a rehearsal and during the warm-up.
        was_finite: whether the step's own norm was. One that was not is a spike even without a threshold, and is
            explained if the rest is finite.

    Returns:
        (verdict, reason). ``explained`` and ``not_explained`` need a bound below half the distance to the threshold;
        otherwise it is ``undecided``.
    """
    if threshold is None and was_finite:
        return "undecided", "a rehearsal: nothing spiked, so there is no threshold to come under"
    if not math.isfinite(norm_after):
        return "not_explained", "without the culprits the gradient is still not finite"
    if threshold is None:
        return "explained", "without the culprits the gradient is finite"
    if not error_bound < abs(threshold - norm_after) / 2:  # a NaN bound decides nothing
        return "undecided", "the measurement's error bound is not below half the distance to the threshold"
    if norm_after < threshold:
        return "explained", "without the culprits the norm is under the threshold"
    return "not_explained", "without the culprits the norm is still over the threshold"


def unit_of(prober: Prober) -> float:
    """Return the relative error of a backward of a few tokens, by the precision of the forward."""
    return _FP32_ERROR if prober.step.dtype == torch.float32 else _BF16_UNIT


def is_subtraction_precise(prober: Prober, norm: float, threshold: float | None, num_tokens: int) -> bool:
    """Return whether the culprits' gradient can be subtracted with an error under a quarter of the threshold.

    This is an estimate, made before any backward: each of their two backwards is taken to be off by one unit, counted
    :data:`CERTAIN` times, and both by another one that they share. A rehearsal has nothing to decide.

    Args:
        prober: the step.
        norm: of the culprits' gradient.
        threshold: the trigger's; None on a rehearsal.
        num_tokens: the number of culprit tokens.
    """
    if threshold is None:
        return True
    noise = (CERTAIN * (1 + 1 / _SECOND) + 1) * unit_of(prober)
    additions = (prober.step.num_micro_batches + 2) + (num_tokens + 2)
    error = (noise + additions * prober.space.rounding + prober.reduction_error) * norm
    return error < threshold / 4


class _Measurement(NamedTuple):
    """The norm of a step without its culprits."""

    norm_after: float
    error_bound: float
    difference: float | None
    """Norm of the difference of two replays; None where nothing was replayed."""
    method: str


def micro_batches_with(tokens: Iterable[Token]) -> list[int]:
    """Return the micro-batches that hold these tokens."""
    return sorted({token.micro_batch for token in tokens})


@dataclass(frozen=True)
class Removal:
    """A step without its culprits. All ranks measure it together."""

    prober: Prober
    """The step; its ``.grad`` is overwritten and left holding the residual gradient."""
    spike: Gradient
    """The training gradient set aside, which is ``scale`` times the true one."""
    scale: float
    """The factor that clipping put on it; in (0, 1]."""
    norm_before: float
    """The trainer's norm, before clipping."""
    threshold: float | None
    """The trigger's, on the norm; None on a rehearsal and during the warm-up."""
    culprits: list[Token]
    """Tokens to leave out."""
    can_afford: Callable[[int], bool] = lambda _: True
    """Whether this many more probes may be made. One pass over the micro-batches always may."""
    parts: Sequence[Sequence[Token]] = ()
    """The culprits in parts, loudest first, whose norms are wanted as well; none: one part."""
    least_norm: float = 0.0
    """A lower bound on the sum of the norms of the parts, which may cancel each other in the spike."""
    on_part: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
    """Called with a part's number, its gradient's squared norms and inner products with :attr:`spike`, by parameter:
    float64 (num_params,) both. Only where *subtract* measures the part."""

    def certify(self, goes_on: bool = False) -> Certificate:
        """Measure the step's gradient norm without the culprits.

        Args:
            goes_on: whether the search will go on if the norm is still over the threshold; then that needs no proof.
        """
        prober, before, threshold = self.prober, self.norm_before, self.threshold
        was_finite = math.isfinite(before)
        if not self.culprits:
            verdict, reason = verdict_of(before, 0.0, threshold, was_finite)
            reason = reason if threshold is None and was_finite else "no culprit was found, so nothing is explained"
            return Certificate(before, before, 0.0, threshold, "none", verdict, reason)
        found = self.measure() if was_finite else None
        if found is None:
            ways = partial(prober.compute_without, self.culprits), partial(fullest, prober, self.culprits)
            found = _Measurement(*recompute(prober, *ways, threshold, self.can_afford, goes_on), "recompute")
        verdict, reason = verdict_of(found.norm_after, found.error_bound, threshold, was_finite)
        return Certificate(
            before, found.norm_after, found.error_bound, threshold, found.method, verdict, reason, found.difference
        )

    def measure(self) -> _Measurement | None:
        """Measure by *subtract* or *swap*; None where recomputing everything costs less, or they do not decide."""
        num_micro_batches, parts = self.prober.step.num_micro_batches, self.parts or [self.culprits]
        norm = max(self.norm_before, self.least_norm)
        subtracts = is_subtraction_precise(self.prober, norm, self.threshold, len(self.culprits))
        cost = (
            sum(len(micro_batches_with(part)) for part in [*parts, parts[0]])
            if subtracts
            else 3 * len(micro_batches_with(self.culprits))
        )
        norms = len(parts) - 1 if subtracts else 0  # backwards that recomputing would need for the parts' norms
        # costs are in probes of one micro-batch; if they do not decide, a pass over all micro-batches follows
        if cost >= num_micro_batches + norms or not self.can_afford(cost + num_micro_batches):
            return None
        return self._subtract(parts) if subtracts else self._swap()

    def _subtract(self, parts: Sequence[Sequence[Token]]) -> _Measurement | None:
        prober, space = self.prober, self.prober.space
        loudest, *others = parts
        own: list[torch.Tensor] = []
        products: list[torch.Tensor] = []

        def compute(part: Sequence[Token], factor: float = 1.0) -> None:
            prober.compute_only(part, micro_batches_with(part), factor=factor)
            if factor == 1.0:
                own.append(space.run_local_synced(space.own_squares))
                if self.on_part is not None:
                    products.append(space.run_local_synced(lambda: space.own_dots(space.current(), self.spike)))

        compute(loudest)
        first = space.keep()
        compute(loudest, factor=-_SECOND)
        space.scale(1.0 / _SECOND)
        prober.add(first)
        own.insert(0, space.run_local_synced(space.own_squares))
        if others and self._is_lost(own, products, len(parts)):
            return None
        # Let g be the culprit's gradient, and n that of the loss that passes through no token. The first backward gave
        # g + n; the second, times 4/3, -g + 4/3 n; their sum is 7/3 n. Times 3/7 it is n, and n less the first is -g.
        space.scale(_SECOND / (1.0 + _SECOND))
        prober.add(first, alpha=-1.0)
        prober.add(self.spike, alpha=1.0 / self.scale)
        for part in others:
            rest = space.keep()
            compute(part)
            space.scale(-1.0)
            prober.add(rest)
        *sums, _ = space.reduce_all(lambda: [*own, space.own_squares(), *products])
        squares, dots = sums[: len(parts) + 2], sums[len(parts) + 2 :]
        self._pass_on(squares[1:], dots)
        difference, *norms, norm_after = (math.sqrt(float(each.sum())) for each in squares)
        norm = sum(norms)
        rounding = self._rounding(len(self.culprits) + 2, norm)
        noise = self._noise(difference, norm, len(parts))
        return self._decided(norm_after, rounding, noise, difference, "subtract")

    def _is_lost(self, own: list[torch.Tensor], products: list[torch.Tensor], num_parts: int) -> bool:
        """Return whether the loudest part's two backwards differ too much for the others to be worth theirs."""
        *sums, _ = self.prober.space.reduce_all(lambda: [*own, *products])
        difference, norm = (math.sqrt(float(each.sum())) for each in sums[:2])
        is_lost = self.threshold is not None and self._noise(difference, norm, num_parts) >= self.threshold / 4
        if is_lost:
            self._pass_on(sums[1:2], sums[2:])
        return is_lost

    def _noise(self, difference: float, norm: float, num_parts: int) -> float:
        """Bound the error of parts of this norm together, if the loudest one's two backwards differ by this much."""
        return CERTAIN * num_parts**0.5 * difference + unit_of(self.prober) * norm  # other parts differ by no more

    def _pass_on(self, squares: Sequence[torch.Tensor], dots: Sequence[torch.Tensor]) -> None:
        if self.on_part is not None:
            for number, dot in enumerate(dots):
                self.on_part(number, squares[number], dot)

    def _swap(self) -> _Measurement | None:
        prober, space = self.prober, self.prober.space
        held = micro_batches_with(self.culprits)
        prober.compute((index, None) for index in held)
        with_culprits = space.keep()
        norm = space.norm(with_culprits)
        prober.compute((index, None) for index in held)
        prober.add(with_culprits, alpha=-1.0)
        difference = space.norm()
        noise = CERTAIN * difference + _BF16_UNIT * norm if difference > 0 else 0.0
        if self.threshold is not None and noise >= self.threshold / 2:
            return None  # a norm under the threshold would drown in the noise
        prober.compute_without(self.culprits, held)
        rounding = self._rounding(len(held) + 4, norm + prober.norm())
        prober.add(with_culprits, alpha=-1.0)
        prober.add(self.spike, alpha=1.0 / self.scale)
        return self._decided(space.norm(), rounding, noise, difference, "swap")

    def _rounding(self, num_additions: int, norm: float) -> float:
        """Bound the error of training's additions, of this many more with gradients of this norm, and of the reductions
        over ranks."""
        num_micro_batches, reduced = self.prober.step.num_micro_batches, self.prober.reduction_error
        added = self.prober.space.rounding * ((num_micro_batches + 2) * self.norm_before + num_additions * norm)
        return added + reduced * (self.norm_before + norm)

    def _decided(
        self, norm_after: float, rounding: float, noise: float, difference: float, method: str
    ) -> _Measurement | None:
        """Return the measurement; None if its error is too large and recomputing would be more precise."""
        verdict, _ = verdict_of(norm_after, rounding + noise, self.threshold)
        is_noisy = verdict == "not_explained" and noise > REPLAY_TOLERANCE * norm_after  # and it is the next direction
        is_vague = verdict == "explained" and noise > norm_after and self.can_afford(self.prober.step.num_micro_batches)
        if self.threshold is not None and (verdict == "undecided" or is_noisy or is_vague):
            return None
        return _Measurement(norm_after, rounding + noise, difference, method)


def recompute(
    prober: Prober,
    compute: Callable[[Sequence[int]], None],
    to_repeat: Callable[[], int],
    threshold: float | None,
    can_afford: Callable[[int], bool],
    goes_on: bool = False,
) -> tuple[float, float, float | None]:
    """Measure the norm of another gradient of the step by a pass over its micro-batches.

    Args:
        prober: the step; its ``.grad`` is left holding that gradient.
        compute: fills ``.grad`` with that gradient, from these micro-batches.
        to_repeat: chooses the micro-batch that is replayed where the error has to be known better; only called then.
        threshold: what the norm is compared with.
        can_afford: whether this many more probes may be made.
        goes_on: as of :meth:`Removal.certify`.

    Returns:
        The norm, a bound on its error, and by how much two replays differ; None where nothing was replayed.
    """
    space, num_micro_batches = prober.space, prober.step.num_micro_batches
    compute(range(num_micro_batches))
    norm_after = prober.norm()
    rounding = (num_micro_batches**2 * space.rounding + prober.reduction_error) * norm_after
    error_bound = rounding + REPLAY_TOLERANCE * norm_after
    is_decided = verdict_of(norm_after, error_bound, threshold, was_finite=False)[0] != "undecided"
    is_open = goes_on and threshold is not None and norm_after >= threshold
    if not math.isfinite(norm_after) or is_decided or is_open or not can_afford(2):
        return norm_after, error_bound, None
    residual, one = space.keep(), [to_repeat()]
    compute(one)
    first = space.keep()
    compute(one)
    prober.add(first, alpha=-1.0)
    difference = space.norm()
    space.put(residual)
    if difference == 0:
        return norm_after, rounding, difference
    # Two draws of one micro-batch differ by sqrt(2) times the error of one; M independent errors add up to sqrt(M).
    noise = CERTAIN * difference * (num_micro_batches / 2) ** 0.5 + _BF16_UNIT * norm_after
    return norm_after, rounding + noise, difference


def fullest(prober: Prober, culprits: list[Token]) -> int:
    """Return the micro-batch with most tokens besides the culprits: one without any has no gradient to compare."""
    step, ranks = prober.step, prober.ranks
    indices = range(step.num_micro_batches)
    tokens = ranks.sum(ranks.run_local_synced(lambda: [float(step.token_mask(index).sum()) for index in indices]))
    taken = Counter(token.micro_batch for token in culprits)
    return max(indices, key=lambda index: tokens[index] - taken[index])
