# SPDX-License-Identifier: Apache-2.0
"""Estimate every token's gradient norm from forwards at random weights, also of tokens that cancel.

For v standard normal, what token t adds to the loss (:mod:`.share`) varies at theta + s v with variance s^2 ||g_t||^2,
to first order, whatever other tokens do (Hutchinson's estimator on each row of the Jacobian; docs/method.md, section
5). So the sample variance over k + 1 forwards, divided by s^2, is an unbiased estimate of ||g_t||^2 with k degrees of
freedom. What the forwards share, rounding and curvature, cancels.

Shapes: B rows of a micro-batch, T response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..core.precision import UNITS, NoFloat32
from ..core.step import Outputs
from ..record import PathEntry
from .candidates import find_by_value
from .share import Readout
from .task import SearchResult, Span, Task, verify
from .weights import MovedWeights, forward_on_routes, hold_routes

NUM_DIRECTIONS = 16
_LEAST_DIRECTIONS = 4
_DELTA = 0.05  # the probability with which a culprit's estimate, or the bound on all tokens, may be too low
_RELATIVE_STEP = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}  # times the weights' root mean square


@dataclass
class NormSketch:
    """Estimated norm of every token's gradient."""

    norms: list[torch.Tensor]
    """This rank's tokens by micro-batch, float64 (B, T)."""
    inflation: float
    """Factor from an estimate to its upper bound, for all tokens at once: sqrt(k / chi2_{k, delta / N})."""


def measure_norms(task: Task, without: Sequence[Span], num_directions: int = NUM_DIRECTIONS) -> NormSketch:
    """Estimate every token's gradient norm, at ``num_directions + 1`` forwards of each micro-batch.

    Weights are moved and restored bit for bit. ``num_directions`` are k, the degrees of freedom of each estimate. Of
    tokens to be left out the estimate is 0.
    """
    prober = task.prober
    is_fine = prober.unit <= UNITS[torch.float32]
    dtype = torch.float32 if is_fine else prober.step.numerics.dtype
    step_size = _RELATIVE_STEP[dtype] / _root_mean_count(task)

    def prepare() -> tuple[list[Readout], list[torch.Tensor], list[torch.Tensor]]:
        readouts = task.readouts(without)
        means = [torch.zeros_like(readout.slope) for readout in readouts]
        return readouts, means, [torch.zeros_like(mean) for mean in means]

    readouts, means, squares = prober.ranks.run_local_synced(prepare)

    def note(number: int, index: int, outputs: Outputs) -> None:
        value = readouts[index].read(outputs)
        # Welford's running variance: the values are far larger than their spread, so sums of squares would lose it
        delta = value - means[index]
        means[index] += delta / (number + 1)
        squares[index] += delta * (value - means[index])

    hold_routes(prober, range(len(readouts)))
    is_wide = prober.is_wide
    with MovedWeights(prober.space, prober.step.numerics.dtype, is_wide=is_wide) as weights:
        for number in range(num_directions + 1):
            weights.move_randomly(number + 1, step_size)
            for index in range(len(readouts)):
                outputs = forward_on_routes(prober, index)
                prober.ranks.run_local_synced(partial(note, number, index, outputs))

    def finish() -> tuple[list[torch.Tensor], float]:
        norms = [(square / num_directions).sqrt() / step_size for square in squares]
        return norms, sum(float((readout.slope != 0).sum()) for readout in readouts)

    norms, count = prober.ranks.run_local_synced(finish)
    num_tokens = max(int(prober.ranks.sum([count])[0]), 1)
    return NormSketch(norms, 1 / _least_part(num_directions, _DELTA / num_tokens))


def sketch(task: Task, named: Sequence[Span] = ()) -> SearchResult:
    """Find tokens with a large gradient of their own, even if they cancel each other; each is verified by a backward,
    which overwrites ``.grad``. Those already ``named`` are left out."""
    result = SearchResult()
    num_micro_batches = task.prober.step.num_micro_batches
    numbers = range(NUM_DIRECTIONS, _LEAST_DIRECTIONS - 1, -1)
    directions = next((k for k in numbers if task.can_afford(forwards=(k + 1) * num_micro_batches)), 0)
    if not directions:
        result.exhausted, result.stop_reason = True, task.limit.words
        return result
    try:
        found = measure_norms(task, named, directions)
    except NoFloat32:  # the same in training's precision
        found = measure_norms(task, named, directions)
    least = task.culprit_norm
    measured = list(named)
    candidates = find_by_value(task, found.norms.__getitem__, _least_part(directions, _DELTA) * least, measured)
    for candidate in candidates[: 2 * task.max_culprits]:
        if len(result.culprits) == task.max_culprits or not task.can_afford(backwards=1):
            break
        culprit = verify(task, candidate, least)
        measured.append(candidate)
        if not culprit.norm < least:
            result.culprits.append(culprit)
    largest = _largest_left(task, found, measured)
    bound = largest * found.inflation
    result.path.append(
        PathEntry(
            "sketch",
            verdict="measured",
            norm=bound,
            threshold=least,
            note=f"every token not verified has a gradient norm of at most {bound * task.unit:.4g}, with "
            f"{1 - _DELTA:.0%} confidence; {len(result.culprits)} of {len(candidates)} candidates were over the "
            "threshold",
        )
    )
    result.stop_reason = "the norm sketch saw every token"
    return result


def _largest_left(task: Task, found: NormSketch, seen: Sequence[Span]) -> float:
    """Return the largest estimate, over all ranks, of a token that is not in ``seen``."""
    ranks = task.prober.ranks

    def local() -> float:
        largest = [0.0]
        for index, norms in enumerate(found.norms):
            left = norms[task.prober.step.token_mask(index) & task.kept(seen, index)]
            largest += [float(left.max())] if len(left) else []
        return max(largest)

    return ranks.max([ranks.run_local_synced(local)])[0]


def _root_mean_count(task: Task) -> float:
    """Return 1 over the weights' root mean square, by which a step is relative to it; 1 for weights that are all 0."""
    square, count = task.prober.space.weight_square_and_count()
    return (count / square) ** 0.5 if square > 0 else 1.0


def _least_part(k: int, probability: float) -> float:
    """Return the part of a norm that its estimate from k directions falls short of with this probability."""
    return (_chi2_quantile(k, probability) / k) ** 0.5


def _chi2_quantile(k: int, probability: float) -> float:
    """Return x with P(chi2_k <= x) = probability, at most 0.5, by bisection on the regularised incomplete gamma."""
    half = torch.tensor(k / 2, dtype=torch.float64)
    low, high = 0.0, float(k)
    while low < (middle := (low + high) / 2) < high:  # until no float64 is between them
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64)))
        low, high = (middle, high) if below < probability else (low, middle)
    return high
