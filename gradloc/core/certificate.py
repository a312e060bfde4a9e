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
"""What the gradient norm is without the culprits: measured, with a bound on its error.

Two ways. *Swap*: R = G - (culprit-holding micro-batches) + (the same without the culprits). Where kernels repeat bit
for bit, what is recomputed cancels, and only accumulation is left as error, a few units of rounding of the spike. Where
they do not (atomics in attention's and the embedding's backward), the error is as large as replays of these
micro-batches differ, which for a spike a thousand times the healthy norm may be more than the healthy norm. So that
difference is measured and part of the bound: where every culprit has had a backward of its own, as what a replay
differs by from the sum of its two parts, at 6 f for each of these micro-batches; where that does not decide, since it
holds the rounding of three backwards in the compute dtype, or is not to be had, between two replays, at 3 f more.
*Recompute*: run every micro-batch without the culprits; its error is that of a healthy gradient, however large the
spike was. It is taken where the swap's bound does not decide, where it costs no more, and once G is not finite. Its
bound is a tenth of what is left, more than passes of any kernels differ by; where that does not decide, two replays
tell how far they do.

A difference of two replays is one draw: kernels that do not repeat may have erred more in training than in both. So
once there is any difference, one unit in the last place of bfloat16, the coarsest format that a backward holds its
gradients in, of what was replayed is added to three times the difference.
"""

import math
from collections import Counter
from dataclasses import dataclass

from .gradients import Gradient
from .probe import Prober
from .selection import Token

__all__ = ["Certificate", "certify", "judge"]

_DRAWS = 3.0  # the difference of two replays is one draw; another is hardly ever larger than this many times it
_UNIT = 2.0**-8  # of bfloat16
_CLEAN = 0.1  # of a residual: with more error than this, it is no direction to search along
_APART = 0.1  # of a gradient without culprits: two passes of it differ by less, or nothing could be trained


@dataclass(frozen=True)
class Certificate:
    """The norm with and without the culprits, and what that proves."""

    norm_before: float
    norm_after: float
    error_bound: float
    threshold: float | None
    method: str
    """``swap``, ``recompute`` or ``none`` (nothing to leave out)."""
    verdict: str
    """``explained``, ``undecided`` or ``not_explained``."""
    reason: str
    replay_difference: float | None = None
    """L2 norm by which replays of the micro-batches that hold culprits differ, as the method replayed them (with the
    culprits for a swap, without for a recomputation): two replays, or one and the sum of its parts, which is then
    rounding, too; 0: kernels repeat, None: nothing was replayed twice."""


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


def certify(
    prober: Prober,
    spike: Gradient,
    scale: float,
    norm_before: float,
    threshold: float | None,
    culprits: list[Token],
    alone: Gradient | None = None,
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
    """
    was_finite = math.isfinite(norm_before)
    if not culprits:
        verdict, reason = judge(norm_before, 0.0, threshold, was_finite)
        reason = reason if threshold is None and was_finite else "no culprit was found, so nothing is explained"
        return Certificate(norm_before, norm_before, 0.0, threshold, "none", verdict, reason)
    holders = sorted({token.micro_batch for token in culprits})
    found = None
    if was_finite and (2 if alone else 3) * len(holders) < prober.step.num_micro_batches:
        found = _swap(prober, spike, scale, norm_before, threshold, culprits, holders, alone or [])
    (alone or []).clear()
    norm_after, error_bound, difference, method = found or _recompute(prober, culprits, threshold)
    verdict, reason = judge(norm_after, error_bound, threshold, was_finite)
    return Certificate(norm_before, norm_after, error_bound, threshold, method, verdict, reason, difference)


def _swap(
    prober: Prober,
    spike: Gradient,
    scale: float,
    norm_before: float,
    threshold: float | None,
    culprits: list[Token],
    holders: list[int],
    alone: Gradient,
) -> tuple[float, float, float, str] | None:
    """Norm, bound, replay difference and method; None where kernels do not repeat well enough to decide this way."""
    space = prober.space

    def decided(norm_after: float, difference: float) -> tuple[float, float, float, str] | None:
        noise = _noise(difference, with_norm)
        verdict, _ = judge(norm_after, rounding + noise, threshold)
        is_noisy = verdict == "not_explained" and noise > _CLEAN * norm_after  # and it is searched along next
        if threshold is not None and (verdict == "undecided" or is_noisy):
            return None
        return norm_after, rounding + noise, difference, "swap"

    def repeat() -> float:
        prober.compute((index, None) for index in holders)
        prober.add(with_culprits, alpha=-1.0)
        return space.norm()

    prober.compute((index, None) for index in holders)
    with_culprits = space.take()
    with_norm = space.norm(with_culprits)
    if threshold is not None and _UNIT * with_norm >= threshold / 8:
        alone.clear()  # the difference from the sum of the parts would not decide
    difference = 0.0 if alone else repeat()
    if threshold is not None and _noise(difference, with_norm) >= threshold / 2:
        return None  # no norm under the threshold could be told from it
    prober.compute_without(culprits, holders)
    # each addition is off by a unit of what it gives at most: training's, the replays' and the ones below
    num, count = prober.step.num_micro_batches, len(holders)
    rounding = space.rounding * ((num + 2) * norm_before + (count + 4) * (with_norm + space.norm()))
    prober.add(with_culprits, alpha=-1.0)
    is_apart = bool(alone)
    if is_apart:
        prober.add(alone)
        difference = space.norm()
        prober.add(alone, alpha=-1.0)
        alone.clear()
    prober.add(spike, alpha=1.0 / scale)
    norm_after = space.norm()
    found = decided(norm_after, difference)
    if found is None and is_apart and judge(norm_after, rounding, threshold)[0] != "undecided":
        residual = space.take()
        difference = repeat()
        space.put(residual)
        found = decided(norm_after, difference)
    return found


def _noise(difference: float, norm: float) -> float:
    """A bound on what training's own pass differed by, where replays of what has this norm did by ``difference``."""
    return _DRAWS * difference + _UNIT * norm if difference > 0 else 0.0


def _recompute(
    prober: Prober, culprits: list[Token], threshold: float | None
) -> tuple[float, float, float | None, str]:
    """Norm, bound, replay difference and method, from every micro-batch without the culprits."""
    space, num_micro_batches = prober.space, prober.step.num_micro_batches
    prober.compute_without(culprits)
    norm_after = space.norm()
    rounding = num_micro_batches**2 * space.rounding * norm_after
    error_bound = rounding + _APART * norm_after
    if not math.isfinite(norm_after) or judge(norm_after, error_bound, threshold, was_finite=False)[0] != "undecided":
        return norm_after, error_bound, None, "recompute"
    residual = space.take()
    fullest = _fullest(prober, culprits)
    prober.compute_without(culprits, [fullest])
    first = space.take()
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
