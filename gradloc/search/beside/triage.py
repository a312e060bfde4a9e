# SPDX-License-Identifier: Apache-2.0
"""Was it the tokens at all? Checks that cost far less than a search, most of them made before it.

In this order: do replicas hold the same weights; does the spike come back (on request); are all weights finite; is only
a padded position's loss not finite; is the whole batch scaled beside this run's past. Later, if shares do not add up:
does a part of the gradient pass through no token; is the gradient the log-probs' derivative. docs/method.md, "A spike
that no token made".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ...core.certificate import judge
from ...core.gradients import Gradient, GradientSpace
from ...core.history import excess
from ...core.ranks import Ranks
from ...core.tracker import median_size
from ...record import Certificate, PathEntry, Rerun, StepCause
from ..share import ShareMap, measure_shares
from ..task import SearchResult, Task

TRANSIENT = "the spike did not come back when its micro-batches were run again as they were"

_STABLE = 1.5  # a factor: closures of two step sizes that are closer do not depend on the step
_REPEATS = 0.1  # of the norm: two runs of the same micro-batches differ by less, however badly kernels repeat
_MOST_NAMES = 8  # parameters named in an event
_MOST_PLACES = 8  # positions named in an event
_TINY = 1e-30  # instead of a usual square of 0
_SAME = 1e-10  # of the sum of absolute weights: float64 sums of equal weights differ by less on any two machines
_NOTABLE_SHARE = 0.05  # of a squared norm: parameters with less are not named
_ALIKE = 0.1  # of the norm: a rehearsal, without a threshold, comes back if it differs by less


def rerun(task: Task) -> Rerun:
    """Run all micro-batches again as they were, one probe each, and compare with the spike."""
    prober, spike = task.prober, task.spike
    prober.compute((index, None) for index in range(prober.step.num_micro_batches))
    norm = prober.space.norm()
    prober.add(task.gradient, alpha=-1.0 / task.scale)
    difference = prober.space.norm() / spike.grad_norm
    if not math.isfinite(spike.grad_norm):
        is_reproduced = not math.isfinite(norm)
    elif spike.threshold is None:
        is_reproduced = difference <= _ALIKE
    else:
        is_reproduced = not norm <= spike.threshold
    return Rerun(norm, difference if math.isfinite(difference) else math.nan, is_reproduced)


def triage(task: Task, typical: Mapping[str, tuple[float, float]], reran: Rerun | None) -> SearchResult | None:
    """What made the spike, if no token did; None if only a search can tell.

    Args:
        task: what would be searched.
        typical: what is usual in this run, from :meth:`...core.history.ScaleHistory.typical`.
        reran: the spike run again; None if that was not asked for.
    """
    parted = parted_replicas(task.prober.space, task.prober.ranks)
    if parted:
        why = f"{len(parted)} parameter{'s have' if len(parted) > 1 else ' has'} other weights on some replicas"
        return _result(
            task, "weights", StepCause("replicas_differ", why, {"parameters": len(parted)}, parted[:_MOST_NAMES])
        )
    if reran is not None and not reran.is_reproduced:
        return _result(task, "transient", StepCause("transient", TRANSIENT, {"rerun_norm": reran.norm}))
    if not math.isfinite(task.spike.grad_norm):
        return _weights(task) or _padding(task)
    return _scaled(task, typical)


def non_finite_weights(space: GradientSpace) -> tuple[str, ...]:
    """Names of the parameters, trained or frozen, that hold a NaN or inf on any rank: one reduction."""
    named = space.named_weights()

    def local() -> torch.Tensor:
        # The sum of absolute values is finite if all of them are. isfinite() would allocate the size of a parameter.
        sums = [torch.linalg.vector_norm(shard, ord=1, dtype=torch.float32) for _, shard in named]
        return (~torch.stack(sums).isfinite()).double()

    bad = space.reduce(local)
    return tuple(name for (name, _), count in zip(named, bad.tolist(), strict=True) if count)


def parted_replicas(space: GradientSpace, ranks: Ranks) -> tuple[str, ...]:
    """Names of the parameters, trained or frozen, whose replicas hold different weights.

    All ranks call this together: one pass over the weights and one reduction, or nothing if there are no replicas. Two
    float64 sums per parameter are compared, of the weights and of their absolute values. One optimizer step that a
    replica did not take moves them by far more than their rounding.
    """
    if space.num_replicas == 1 or type(space) is not GradientSpace:  # other engines have their own layout of copies
        return ()
    named = space.named_weights()
    shape = (2, ranks.num_processes // space.num_replicas, len(named), 2)

    def local() -> list[float]:
        sums = [shard.sum(dtype=torch.float64) for _, shard in named]
        sizes = [torch.linalg.vector_norm(shard, ord=1, dtype=torch.float64) for _, shard in named]
        mine = torch.stack([torch.stack(sums), torch.stack(sizes)], 1).nan_to_num(nan=0.0).cpu()
        both = torch.full(shape, -math.inf, dtype=torch.float64)
        both[:, space.shard_index] = torch.stack([mine, -mine])  # one maximum then gives largest and smallest
        return both.flatten().tolist()

    most, negated = torch.tensor(ranks.max(ranks.agree(local)), dtype=torch.float64).view(shape)
    is_parted = (most + negated > _SAME * most[..., 1:]).any(-1).any(0)
    return tuple(name for (name, _), flag in zip(named, is_parted.tolist(), strict=True) if flag)


def suspects(squares: Mapping[str, float], usual: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """The parameters with a notable part of a squared norm, most suspect first.

    Args:
        squares: squared norms by name.
        usual: the same of a gradient that nothing is wrong with; the parameter that is furthest above comes first.
            None: the largest comes first.
    """
    least = _NOTABLE_SHARE * math.fsum(squares.values())
    kept = [name for name in squares if squares[name] >= least]
    return tuple(
        sorted(kept, key=lambda name: -squares[name] / (max(usual[name], _TINY) if usual else 1))[:_MOST_NAMES]
    )


def _weights(task: Task) -> SearchResult | None:
    names = non_finite_weights(task.prober.space)
    if not names:
        return None
    why = f"{len(names)} parameter{'s hold' if len(names) > 1 else ' holds'} weights that are not finite"
    return _result(
        task, "weights", StepCause("non_finite_weights", why, {"parameters": len(names)}, names[:_MOST_NAMES])
    )


def _padding(task: Task) -> SearchResult | None:
    """The result if only positions outside of the response mask have coefficients that are not finite, and the gradient
    without them is finite; else None."""
    prober = task.prober
    step, ranks = prober.step, prober.ranks

    def local() -> tuple[int, list[tuple[int | None, int]]]:
        num_bad, places = 0, []
        for index in range(step.num_micro_batches):
            bad, mask, rows = ~torch.isfinite(step.coefficients(index)[0]), step.token_mask(index), step.rows(index)
            num_bad += int((bad & mask).sum())
            for row, position in (bad & ~mask).nonzero()[:_MOST_PLACES].tolist():
                places.append((rows[row] if rows else None, position))
        return num_bad, places[:_MOST_PLACES]

    gathered = ranks.gather(ranks.agree(local))
    places = [place for _, part in gathered for place in part]
    if not places or any(num_bad for num_bad, _ in gathered):
        return None
    prober.compute((index, step.token_mask(index)) for index in range(step.num_micro_batches))
    norm = prober.space.norm()
    if not math.isfinite(norm):
        return None
    why = "only positions outside of the response mask have a loss that is not finite"
    source = StepCause("non_finite_padding", why, {}, (), tuple(places[:_MOST_PLACES]))
    bound = (prober.space.rounding * step.num_micro_batches**2 + prober.reduction_error) * norm
    threshold = task.spike.threshold
    verdict, reason = judge(norm, bound, threshold, was_finite=False)
    measured = Certificate(task.spike.grad_norm, norm, bound, threshold, "recompute", verdict, reason)
    return replace(_result(task, "coefficients", source), certificate=measured)


def _scaled(task: Task, typical: Mapping[str, tuple[float, float]]) -> SearchResult | None:
    """The result if the batch's median coefficient is unusual in this run, and the norm over that factor would be under
    the threshold; else None."""
    spike = task.spike
    if spike.threshold is None or "coefficient" not in typical:
        return None
    ranks, step = task.prober.ranks, task.prober.step
    local = ranks.agree(lambda: median_size(step.coefficients(i)[0] for i in range(step.num_micro_batches)))
    present = sorted(value for value in ranks.gather(local) if value > 0)
    if not present:
        return None
    factor = excess(present[len(present) // 2], typical["coefficient"])
    if factor is None or spike.grad_norm / factor > spike.threshold:
        return None
    numbers: dict[str, float | None] = {"coefficient_over_typical": factor}
    times = f"{factor:,.{0 if factor >= 100 else 1}f}"
    why = f"the loss weighs the batch's typical token {times} times as much as in the steps before"
    return _result(task, "scale", StepCause("batch_scale", why, numbers))


def nothing_found(task: Task, reason: str) -> Certificate:
    """The certificate if no token is named, for this reason."""
    return replace(task.certify([]), reason=reason)


def _result(task: Task, phase: str, source: StepCause) -> SearchResult:
    path = [PathEntry(phase, verdict="measured", note=source.reason)]
    certificate = nothing_found(task, source.reason)
    return SearchResult(path=path, stop_reason=source.reason, certificate=certificate, source=source)


@dataclass(frozen=True)
class Parts:
    """The spike's gradient in two parts: what passes through tokens' log-probs and entropies, and the rest."""

    tokens: Gradient
    others: Gradient
    tokens_norm: float
    others_norm: float
    source: StepCause


def split_off(task: Task) -> Parts | None:
    """Measure the gradient that is left when all tokens are detached, such as a router's loss or a regulariser's.

    None, mostly after a single probe of the first micro-batch, if it is smaller than a culprit's.
    """
    prober, space = task.prober, task.prober.space
    num = prober.step.num_micro_batches
    if not task.can_afford(backwards=num):
        return None
    prober.compute([(0, torch.zeros_like(prober.step.token_mask(0)))])
    if num * space.norm() < task.culprit_norm:  # as if all micro-batches were alike
        return None
    prober.compute((index, torch.zeros_like(prober.step.token_mask(index))) for index in range(num))
    squares, others = space.squares_by_name(), space.keep()
    others_norm = math.fsum(squares.values()) ** 0.5
    if others_norm < task.culprit_norm:
        return None
    prober.add(task.gradient, alpha=1.0 / task.scale)
    prober.add(others, alpha=-1.0)
    of_tokens = space.squares_by_name()
    tokens_norm = math.fsum(of_tokens.values()) ** 0.5
    bound = torch.finfo(prober.step.numerics.dtype).eps * others_norm  # the backward added both up and rounded the sum
    why = (
        f"a part of the gradient, of norm {others_norm:.3g}, passes through no token's log-prob or entropy; the "
        f"tokens' part has norm {tokens_norm:.3g} (within {bound:.2g})"
    )
    numbers = {"tokens_norm": tokens_norm, "others_norm": others_norm, "error_bound": bound}
    source = StepCause("not_tokens", why, numbers, suspects(squares, of_tokens))
    return Parts(space.keep(), others, tokens_norm, others_norm, source)


def doubt_backward(task: Task, shares: ShareMap) -> tuple[StepCause, float] | None:
    """If the gradient is not the derivative of the tokens' log-probs: (why, norm when all is run again). Else None.

    It is not if it does not come back. It is not, either, if two step sizes agree on how far closure is off: a wrong
    step would show in that. Then something scales the gradient on its way, a hook or a custom backward. Costs one or
    two passes over all micro-batches.
    """
    prober, space = task.prober, task.prober.space
    everything = range(prober.step.num_micro_batches)
    if shares.unseen or not task.can_afford(backwards=len(everything), is_certificate=True):
        return None  # no certificate follows, so none is kept back
    prober.compute((index, None) for index in everything)
    norm = space.norm()
    prober.add(task.gradient, alpha=-1.0 / task.scale)
    difference = space.norm() / task.spike.grad_norm
    if difference > _REPEATS:
        return StepCause("transient", TRANSIENT, {"rerun_norm": norm, "rerun_difference": difference}), norm
    if not task.can_afford(forwards=2 * len(everything), is_certificate=True):
        return None
    readouts = prober.ranks.agree(lambda: task.readouts([]))
    half = replace(shares, step=shares.step / 2)
    second = measure_shares(prober, readouts, task.gradient, task.scale, everything, half)
    if not (second.closure and 1 / _STABLE < shares.closure / second.closure < _STABLE):
        return None
    why = "the gradient is not the derivative of the tokens' log-probs: something scales it in the backward"
    numbers: dict[str, float | None] = {"closure": shares.closure, "tokens_norm": shares.closure * task.spike.grad_norm}
    return StepCause("not_tokens", why, numbers, suspects(space.squares_by_name(task.gradient))), norm
