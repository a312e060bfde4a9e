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

Two ways. *Swap*: R = G - (culprit-holding micro-batches) + (the same without the culprits); the recomputed kernels
are bit-identical and cancel, so only accumulation is left as error, a few units of rounding of the spike.
*Recompute*: run every micro-batch without the culprits; always right, and the only way once G is not finite.
"""

import math
from dataclasses import dataclass

from .probe import Prober
from .selection import Token

__all__ = ["Certificate", "certify", "judge"]


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
    prober: Prober, spike: list, scale: float, norm_before: float, threshold: float | None, culprits: list[Token]
) -> Certificate:
    """Measure the step's gradient norm without the culprits.

    Args:
        prober: the step; its ``.grad`` is overwritten and left holding the residual gradient.
        spike: the training gradient set aside, holding ``scale`` times the true one.
        scale: the factor that clipping put on ``spike``; in (0, 1].
        norm_before: the norm verl measured before clipping.
        threshold: the trigger's threshold on the norm; None on a rehearsal, and in the warm-up.
        culprits: tokens to leave out.
    """
    was_finite = math.isfinite(norm_before)
    if not culprits:
        verdict, reason = judge(norm_before, 0.0, threshold, was_finite)
        reason = reason if threshold is None and was_finite else "no culprit was found, so nothing is explained"
        return Certificate(norm_before, norm_before, 0.0, threshold, "none", verdict, reason)
    num_micro_batches = prober.step.num_micro_batches
    holders = sorted({token.micro_batch for token in culprits})
    rounding = (num_micro_batches + 4) * prober.space.rounding
    if was_finite and 2 * len(holders) <= num_micro_batches:
        method = "swap"
        prober.compute((index, None) for index in holders)
        with_culprits = prober.space.take()
        prober.compute_without(culprits, holders)
        without_norm = prober.space.norm()
        prober.space.add(with_culprits, alpha=-1.0)
        prober.space.add(spike, alpha=1.0 / scale)
        error_bound = rounding * (norm_before + prober.space.norm(with_culprits) + without_norm)
        norm_after = prober.space.norm()
    else:
        method = "recompute"
        prober.compute_without(culprits)
        norm_after = prober.space.norm()
        error_bound = rounding * num_micro_batches * norm_after
    verdict, reason = judge(norm_after, error_bound, threshold, was_finite)
    return Certificate(norm_before, norm_after, error_bound, threshold, method, verdict, reason)
