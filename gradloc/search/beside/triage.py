# SPDX-License-Identifier: Apache-2.0
"""Before any search: is there something to look for among the tokens? Each check costs far less than a search.

In this order: are the weights of replicas the same; does the spike come back at all (on request); are the weights
finite; is it a padded position that is not; is the whole batch scaled against the run's own history.
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

_STABLE = 1.5  # two step sizes give closure alike: within this factor
_REPEATS = 0.1  # of the norm: kernels that are not bit-reproducible differ by less
_MOST_NAMES = 8
_MOST_PLACES = 8
_TINY = 1e-30
_SAME = 1e-10  # of the sum of absolute values: what float64 sums of equal weights differ by on two kinds of machine
_NOTABLE_SHARE = 0.05  # of a squared norm
_ALIKE = 0.1  # of the norm: on a rehearsal, which has no threshold, what counts as the same


def rerun(task: Task) -> Rerun:
    """Run all micro-batches again; one probe each."""
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
    """What made the spike, where no token did; None where only a search can tell.

    Args:
        task: what would be searched.
        typical: of the run, see :meth:`~.scale.ScaleHistory.typical`.
        reran: the spike run again, where that was asked for.
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
    """Names of the parameters, trained or frozen, that hold a NaN or an infinity on any rank: one reduction."""
    named = space.named_weights()

    def local() -> torch.Tensor:
        # the sum of absolute values is finite where all are: one pass, nothing the size of a parameter is allocated
        sums = [torch.linalg.vector_norm(shard, ord=1, dtype=torch.float32) for _, shard in named]
        return (~torch.stack(sums).isfinite()).double()

    bad = space.reduce(local)
    return tuple(name for (name, _), count in zip(named, bad.tolist(), strict=True) if count)


def parted_replicas(space: GradientSpace, ranks: Ranks) -> tuple[str, ...]:
    """Names of the parameters, trained or frozen, whose weights are not the same on all processes that hold a shard.

    All ranks call this together: one pass over the weights and one reduction, or nothing where there are no replicas.
    Two float64 sums per parameter tell: one step of an optimizer that another process did not take moves them by far
    more than their rounding.
    """
    if space.num_replicas == 1 or type(space) is not GradientSpace:  # another engine lays its copies out by itself
        return ()
    named = space.named_weights()
    shape = (2, ranks.num_processes // space.num_replicas, len(named), 2)

    def local() -> list[float]:
        sums = [shard.sum(dtype=torch.float64) for _, shard in named]
        sizes = [torch.linalg.vector_norm(shard, ord=1, dtype=torch.float64) for _, shard in named]
        mine = torch.stack([torch.stack(sums), torch.stack(sizes)], 1).nan_to_num(nan=0.0).cpu()
        both = torch.full(shape, -math.inf, dtype=torch.float64)
        both[:, space.shard_index] = torch.stack([mine, -mine])
        return both.flatten().tolist()

    most, negated = torch.tensor(ranks.max(ranks.agree(local)), dtype=torch.float64).view(shape)
    is_parted = (most + negated > _SAME * most[..., 1:]).any(-1).any(0)
    return tuple(name for (name, _), flag in zip(named, is_parted.tolist(), strict=True) if flag)


def suspects(squares: Mapping[str, float], usual: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """The parameters that carry a notable part of a squared norm, most suspect first.

    Args:
        squares: by name.
        usual: the same of a gradient that nothing is wrong with: first is who is furthest above. None: who is largest.
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
    """Where a masked position alone has a coefficient that is not finite, and the rest a gradient that is."""
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
    """Where the batch's typical advantage or coefficient is above the run's, and that alone makes the spike."""
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
    """The certificate where no token is named, with this reason."""
    return replace(task.certify([]), reason=reason)


def _result(task: Task, phase: str, source: StepCause) -> SearchResult:
    path = [PathEntry(phase, verdict="measured", note=source.reason)]
    certificate = nothing_found(task, source.reason)
    return SearchResult(path=path, stop_reason=source.reason, certificate=certificate, source=source)


@dataclass(frozen=True)
class Parts:
    """A gradient in two: what passes through tokens, and the rest."""

    tokens: Gradient
    others: Gradient
    tokens_norm: float
    others_norm: float
    source: StepCause


def split_off(task: Task) -> Parts | None:
    """Measure the gradient that is left when no token passes any: a loss of a router's, a regulariser's.

    Returns:
        None, after one probe, where it is less than a culprit's worth.
    """
    prober, space = task.prober, task.prober.space
    num = prober.step.num_micro_batches
    if not task.can_afford(backwards=num):
        return None
    prober.compute([(0, torch.zeros_like(prober.step.token_mask(0)))])
    if num * space.norm() < task.culprit_norm:
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
    bound = torch.finfo(prober.step.compute_dtype).eps * others_norm  # both were added up in the backward
    why = (
        f"a part of the gradient, of norm {others_norm:.3g}, passes through no token's log-prob or entropy; the "
        f"tokens' part has norm {tokens_norm:.3g} (within {bound:.2g})"
    )
    numbers = {"tokens_norm": tokens_norm, "others_norm": others_norm, "error_bound": bound}
    source = StepCause("not_tokens", why, numbers, suspects(squares, of_tokens))
    return Parts(space.keep(), others, tokens_norm, others_norm, source)


def doubt_backward(task: Task, shares: ShareMap) -> tuple[StepCause, float] | None:
    """Where the gradient is not what the log-probs' change says: why, and the norm as everything is run again.

    It is not the tokens' when it does not come back, or when two step sizes agree about how far it is off: then
    something scales it on its way, a hook or a backward of somebody's own. One or two passes over all micro-batches.
    """
    prober, space = task.prober, task.prober.space
    everything = range(prober.step.num_micro_batches)
    if shares.unseen or not task.can_afford(backwards=len(everything), is_certificate=True):
        return None  # nothing is named where it is the backward's, so no certificate is kept back
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
