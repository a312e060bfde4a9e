# SPDX-License-Identifier: Apache-2.0
"""Check causes of a spike that are not its tokens, and find the module where a NaN or inf first appears.

The checks cost far less than a search, and most of them are made before it: docs/method.md, "A spike that no token
made", has them in their order.

For a gradient that is not finite, hooks during a replay of one micro-batch find the module where NaN or inf first
appears, forward or backward. Each module's output, and the gradient that comes back to it, is measured by its largest
absolute value, which stays on the device until the end. The last values before the first that is not finite show
whether numbers grew until they overflowed.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..core.certificate import REPLAY_TOLERANCE, verdict_of
from ..core.gradients import Gradient, GradientSpace, totals_of
from ..core.ranks import PeerFailure, Ranks
from ..core.sharding import plain_name
from ..core.step import typical_sizes
from ..core.tracker import median_size
from ..explain.numbers import number
from ..explain.text import plural
from ..record import Certificate, Fault, FirstNotFinite, PathEntry, Rerun, StepCause
from ..trigger.history import excess
from .candidates import TINY, find_usual_pull
from .share import ShareMap, ShareMeasurement
from .task import SearchResult, Task

TRANSIENT = "the spike did not come back when its micro-batches were run again as they were"

_STABLE = 1.5  # a factor: closures of two step sizes that are closer do not depend on the step

MOST_NAMES = 8  # parameters, or positions, named in an event
_SAME = 1e-10  # of the sum of absolute weights: float64 sums of equal weights differ by less on any two machines
NOTABLE_SHARE = 0.05  # of a squared norm: parameters or rows with less are not listed
_NUM_BEFORE = 3  # modules listed before the first that is not finite
_DIRECTIONS = ("forward", "backward")
_WITH_NORM = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def rerun(task: Task) -> Rerun:
    """Run all micro-batches again as they were, one probe each, and compare with the spike."""
    spike, (norm, difference) = task.spike, _again(task)
    if not math.isfinite(spike.grad_norm):
        is_reproduced = not math.isfinite(norm)
    elif spike.threshold is None:
        is_reproduced = difference <= REPLAY_TOLERANCE
    else:
        is_reproduced = not norm <= spike.threshold
    return Rerun(norm, difference if math.isfinite(difference) else math.nan, is_reproduced)


def _again(task: Task) -> tuple[float, float]:
    """Run all micro-batches again; returns the norm, and the distance from the spike over the spike's norm."""
    prober = task.prober
    prober.compute((index, None) for index in range(prober.step.num_micro_batches))
    norm = prober.space.norm()
    prober.add(task.gradient, alpha=-1.0 / task.scale)
    return norm, prober.space.norm() / task.spike.grad_norm


def _not_reproduced(task: Task, numbers: dict[str, float | None]) -> StepCause:
    """Return why a spike does not come back: where two runs are alike its gradient was changed after the backward,
    else the machine does not repeat itself.

    ``.grad`` holds the first run's gradient less the spike's. One gradient more is held.
    """
    prober, space = task.prober, task.prober.space
    everything = range(prober.step.num_micro_batches)
    if not task.can_afford(backwards=len(everything), is_certificate=True):
        return StepCause("transient", TRANSIENT, numbers)
    first = space.keep()
    prober.compute((index, None) for index in everything)
    again, norm = space.squares(), space.norm()
    prober.add(task.gradient, alpha=-1.0 / task.scale)
    prober.add(first, alpha=-1.0)
    if not space.norm() <= REPLAY_TOLERANCE * norm:
        return StepCause("transient", TRANSIENT, numbers)
    given = space.squares(task.gradient) / task.scale**2
    ratios = (given / again.clamp(min=TINY)).sqrt()
    off = (given.sqrt() - again.sqrt()).square()
    order = [int(index) for index in off.argsort(descending=True) if off[index] >= NOTABLE_SHARE * off.sum()]
    names = tuple(space.names[index] for index in order[:MOST_NAMES])
    factor = float(ratios[order[0]]) if order else 1.0
    numbers = {**numbers, "factor": factor}
    if float(ratios[again > 0].max()) <= _STABLE * float(ratios[again > 0].min()):
        why = f"every gradient was multiplied by {number(factor, 3)} after the backward"
        return StepCause("gradient_scaled", why, {**numbers, "factor_times": factor})
    times = number(factor, 3)
    why = f"two further runs give the same gradient, and the optimizer got another: {names[0]}'s {times} times"
    return StepCause("gradient_changed", why, {**numbers, "difference": numbers.get("rerun_difference")}, names)


def find_batch_independent_cause(task: Task, reran: Rerun | None) -> SearchResult | None:
    """Return a cause that does not depend on the batch: broken replicas or weights, or a machine; else None.

    Args:
        task: the spike.
        reran: the spike run again; None if that was not asked for.
    """
    diverged = diverged_params(task.prober.space, task.prober.ranks)
    if diverged:
        return _by_weights(task, "replicas_differ", diverged, ("has", "have"), "other weights on some replicas")
    if reran is not None and not reran.is_reproduced:
        return _result(task, "transient", _not_reproduced(task, {"rerun_norm": reran.norm}))
    if not math.isfinite(task.spike.grad_norm):
        bad = non_finite_weights(task.prober.space)
        if bad:
            return _by_weights(task, "non_finite_weights", bad, ("holds", "hold"), "weights that are not finite")
    return None


def find_loss_cause(task: Task, typical: Mapping[str, tuple[float, float]]) -> SearchResult | None:
    """Return the result if the loss of the whole batch or of padding made the spike; else None.

    ``typical`` is from :meth:`..trigger.history.ScaleHistory.typical`.
    """
    return scaled_batch(task, typical) if math.isfinite(task.spike.grad_norm) else _padding(task)


def non_finite_weights(space: GradientSpace) -> tuple[str, ...]:
    """Name the parameters, trained or frozen, that hold a NaN or inf on any rank: one reduction."""
    # packed 4-bit weights are integers, which are finite; of those in 8 bits torch has no norm
    floating = [(name, shard) for name, shard in space.named_weights() if shard.dtype in _WITH_NORM]

    def local() -> torch.Tensor:
        # The sum of absolute values is finite if all of them are. isfinite() would allocate the size of a parameter.
        sums = [torch.linalg.vector_norm(shard, ord=1, dtype=torch.float32) for _, shard in floating]
        return (~torch.stack(sums).isfinite()).double()

    bad = space.reduce(local)
    return tuple(name for (name, _), count in zip(floating, bad.tolist(), strict=True) if count)


def diverged_params(space: GradientSpace, ranks: Ranks) -> tuple[str, ...]:
    """Name the parameters, trained or frozen, whose replicas hold different weights.

    All ranks call this together: one pass over the weights and one reduction, or nothing if there are no replicas. Two
    float64 sums per parameter are compared, of the weights and of their absolute values. One optimizer step that a
    replica did not take moves them by far more than their rounding.
    """
    if space.num_replicas == 1 or type(space) is not GradientSpace:  # other engines have their own layout of copies
        return ()
    named = space.named_weights()
    shape = (2, ranks.num_processes // space.num_replicas, len(named), 2)

    def local() -> list[float]:
        shards = [shard for _, shard in named]
        mine = torch.stack([totals_of(shards), totals_of(shards, are_absolute=True)], 1).nan_to_num(nan=0.0).cpu()
        both = torch.full(shape, -math.inf, dtype=torch.float64)
        both[:, space.shard_index] = torch.stack([mine, -mine])  # one maximum then gives largest and smallest
        return both.flatten().tolist()

    most, negated = torch.tensor(ranks.max(ranks.run_local_synced(local)), dtype=torch.float64).view(shape)
    is_parted = (most + negated > _SAME * most[..., 1:]).any(-1).any(0)
    return tuple(name for (name, _), flag in zip(named, is_parted.tolist(), strict=True) if flag)


def suspects(squares: Mapping[str, float], usual: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Return the parameters with a notable part of a squared norm: first those furthest above what is ``usual`` in a
    sound gradient; without that the largest."""
    least = NOTABLE_SHARE * math.fsum(squares.values())
    kept = [name for name in squares if squares[name] >= least]
    order = sorted(kept, key=lambda name: -squares[name] / (max(usual[name], TINY) if usual else 1))
    return tuple(order[:MOST_NAMES])


def _by_weights(task: Task, label: str, names: tuple[str, ...], verbs: tuple[str, str], what: str) -> SearchResult:
    """Make the result for parameters that are the cause; ``verbs`` of a single one and of several."""
    why = f"{plural(len(names), 'parameter')} {verbs[len(names) > 1]} {what}"
    return _result(task, "weights", StepCause(label, why, {"parameters": len(names)}, names[:MOST_NAMES]))


def _padding(task: Task) -> SearchResult | None:
    """Return the result if only positions outside of the response mask have coefficients that are not finite, and the
    gradient without them is finite; else None."""
    prober = task.prober
    step, ranks = prober.step, prober.ranks

    def local() -> tuple[int, list[tuple[int | None, int]]]:
        num_bad, places = 0, []
        for index in range(step.num_micro_batches):
            bad, mask, rows = ~torch.isfinite(step.coefficients(index)[0]), step.token_mask(index), step.rows(index)
            num_bad += int((bad & mask).sum())
            for row, position in (bad & ~mask).nonzero()[:MOST_NAMES].tolist():
                places.append((rows[row] if rows else None, position))
        return num_bad, places[:MOST_NAMES]

    gathered = ranks.gather(ranks.run_local_synced(local))
    places = [place for _, part in gathered for place in part]
    if not places or any(num_bad for num_bad, _ in gathered):
        return None
    prober.compute((index, step.token_mask(index)) for index in range(step.num_micro_batches))
    norm = prober.space.norm()
    if not math.isfinite(norm):
        return None
    why = "only positions outside of the response mask have a loss that is not finite"
    source = StepCause("non_finite_padding", why, {}, (), tuple(places[:MOST_NAMES]))
    bound = (prober.space.rounding * step.num_micro_batches**2 + prober.reduction_error) * norm
    threshold = task.spike.threshold
    verdict, reason = verdict_of(norm, bound, threshold, was_finite=False)
    measured = Certificate(task.spike.grad_norm, norm, bound, threshold, "recompute", verdict, reason)
    return replace(_result(task, "coefficients", source), certificate=measured)


def scaled_batch(task: Task, typical: Mapping[str, tuple[float, float]]) -> SearchResult | None:
    """Return the result if the median coefficient of the batch and of most rows is unusual in this run, and the norm
    over that factor would be under the threshold; else None."""
    spike = task.spike
    if spike.threshold is None or "coefficient" not in typical:
        return None
    ranks, step = task.prober.ranks, task.prober.step
    local = ranks.run_local_synced(lambda: median_size(typical_sizes(step, i) for i in range(step.num_micro_batches)))
    present = sorted(value for value in ranks.gather(local) if value > 0)
    if not present:
        return None
    factor = excess(present[len(present) // 2], typical["coefficient"])
    if factor is None or spike.grad_norm / factor > spike.threshold or not find_usual_pull(task).is_scaled:
        return None
    numbers: dict[str, float | None] = {"coefficient_over_typical": factor}
    times = f"{factor:,.{0 if factor >= 100 else 1}f}"
    why = f"the loss weighs the batch's typical token {times} times as much as in the steps before"
    return _result(task, "scale", StepCause("batch_scale", why, numbers))


def make_unsearched(task: Task, why: str) -> SearchResult:
    """Make the result of a step that cannot be searched, for this reason: nothing is named, nothing explained."""
    path = [PathEntry("replay", verdict="differs", note=why)]
    return SearchResult(path=path, stop_reason=why, certificate=certify_nothing(task, why))


def fault_result(task: Task, fault: Fault, path: list[PathEntry]) -> SearchResult:
    """Return the result of a step whose batch is not at fault: no token is named."""
    cause = StepCause(fault.label or "unknown", fault.reason, dict(fault.evidence), fault.parameters)
    certificate = certify_nothing(task, fault.reason)
    return SearchResult(path=path, stop_reason=fault.reason, certificate=certificate, source=cause)


def certify_nothing(task: Task, reason: str) -> Certificate:
    """Make the certificate without any token named, for this reason."""
    return replace(task.certify([]), reason=reason)


def _result(task: Task, phase: str, source: StepCause) -> SearchResult:
    path = [PathEntry(phase, verdict="measured", note=source.reason)]
    certificate = certify_nothing(task, source.reason)
    return SearchResult(path=path, stop_reason=source.reason, certificate=certificate, source=source)


def split_off(task: Task) -> tuple[Gradient, Gradient, StepCause] | None:
    """Measure the gradient that is left when all tokens are detached, such as a router's loss or a regulariser's.

    Returns:
        What passes through tokens' log-probs and entropies, the rest, and the cause with both norms. None, mostly after
        a single probe of one micro-batch, if the rest is smaller than a culprit's.
    """
    prober, space = task.prober, task.prober.space
    num = prober.step.num_micro_batches
    if task.unit != 1.0 or not task.can_afford(backwards=num):  # then coefficients alone explain the norm
        return None
    loudest = max(range(num), key=auxiliary_sizes(task).__getitem__)
    prober.compute([(loudest, torch.zeros_like(prober.step.token_mask(loudest)))])
    if num * space.norm() < task.culprit_norm:  # as if all micro-batches were alike
        return None
    prober.compute((index, torch.zeros_like(prober.step.token_mask(index))) for index in range(num))
    squares, others = space.squares_by_name(), space.keep()
    others_norm = math.fsum(squares.values()) ** 0.5
    if others_norm < task.culprit_norm:
        return None
    prober.add(task.gradient, alpha=1.0 / task.scale)
    prober.add(others, alpha=-1.0)
    from_tokens = space.squares_by_name()
    tokens_norm = math.fsum(from_tokens.values()) ** 0.5
    bound = torch.finfo(prober.step.dtype).eps * others_norm  # the backward added both up and rounded the sum
    why = (
        f"a part of the gradient, of norm {number(others_norm, 3)}, passes through no token's log-prob or entropy; the "
        f"tokens' part has norm {number(tokens_norm, 3)} (within {number(bound, 2)})"
    )
    numbers = {"tokens_norm": tokens_norm, "others_norm": others_norm, "error_bound": bound}
    source = StepCause("not_tokens", why, numbers, suspects(squares, from_tokens))
    return space.keep(), others, source


def auxiliary_sizes(task: Task) -> list[float]:
    """Return the size of what the backward left as the coefficient of the part of the loss that passes through no
    token, of each micro-batch; 0 without any. All ranks call this together."""
    left = [
        task.prober.step.recorded(index).auxiliary_coefficient for index in range(task.prober.step.num_micro_batches)
    ]
    return task.prober.ranks.max([0.0 if found is None else float(found.abs().max()) for found in left])


def doubt_backward(task: Task, shares: ShareMap) -> tuple[StepCause, float] | None:
    """Return the cause and the norm of a second run if the gradient is not the derivative of the tokens' log-probs;
    else None.

    It is not if it does not come back when run again, or if two step sizes agree on how far closure is off. A wrong
    step would make them differ, so a hook or a custom backward scales the gradient. Costs one or two passes over all
    micro-batches.
    """
    prober, space = task.prober, task.prober.space
    everything = range(prober.step.num_micro_batches)
    if task.unit != 1.0 or not task.can_afford(backwards=0 if task.reran else len(everything)):
        return None
    reran = task.reran or rerun(task)
    norm, difference = reran.norm, reran.difference
    assert norm is not None and difference is not None
    if not difference <= REPLAY_TOLERANCE:
        if task.reran:
            _again(task)  # which leaves it in .grad
        return _not_reproduced(task, {"rerun_norm": norm, "rerun_difference": difference}), norm
    if shares.unseen or not task.can_afford(forwards=2 * len(everything)):
        return None
    readouts = prober.ranks.run_local_synced(lambda: task.readouts([]))
    half = replace(shares, step=shares.step / 2)
    second = ShareMeasurement(prober, readouts, task.gradient, task.scale, everything, half).run()
    if not (second.closure and 1 / _STABLE < shares.closure / second.closure < _STABLE):
        return None
    why = "the gradient is not the derivative of the tokens' log-probs: something scales it in the backward"
    numbers: dict[str, float | None] = {"closure": shares.closure, "tokens_norm": shares.closure * task.spike.grad_norm}
    return StepCause("not_tokens", why, numbers, suspects(space.squares_by_name(task.gradient))), norm


# ---- where it began


def first_not_finite(task: Task) -> tuple[FirstNotFinite | None, int | None]:
    """Replay micro-batches, one probe each, until one of them shows it. All ranks call this together.

    Returns:
        Where, and in which micro-batch. (None, None) if none shows it, if the loss's own derivative is not finite, or
        if the search may not cost as much.
    """
    prober, ranks = task.prober, task.prober.ranks
    if prober.step.is_scheduled:  # no process of a pipeline sees all modules
        return None, None
    broken, to_replay = _to_replay(task)
    for index in to_replay:
        if not task.can_afford(backwards=1, is_certificate=True):
            break
        sizes = _Sizes()
        try:
            with sizes.of(prober.space.model):
                prober.compute([(index, None)])
            mine = ranks.run_local_synced(partial(sizes.first, _DIRECTIONS if broken else _DIRECTIONS[1:]))
            found = [first for first in ranks.gather(mine) if first is not None]
        except PeerFailure:  # all ranks heard of it, and go on without
            break
        if found:
            return min(found, key=lambda first: _DIRECTIONS.index(first.way)), index
    return None, None


def _to_replay(task: Task) -> tuple[bool, list[int]]:
    """Return whether a log-prob is not finite, and the micro-batches to replay: the first with such a log-prob, none if
    only the loss is not finite, else all."""
    step, ranks = task.prober.step, task.prober.ranks
    num = step.num_micro_batches

    def local() -> list[float]:
        masks = [step.token_mask(index) for index in range(num)]
        forwards = [step.recorded(index).log_prob[mask] for index, mask in enumerate(masks)]
        losses = [step.coefficients(index)[0][mask] for index, mask in enumerate(masks)]
        return [float(not values.isfinite().all()) for values in forwards + losses]

    flags = ranks.max(ranks.run_local_synced(local))
    broken = [index for index in range(num) if flags[index]]
    return bool(broken), broken[:1] if broken else [] if any(flags) else list(range(num))


class _Sizes:
    """The largest |value| of every module's output and of its gradient, in the order of computation."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[str, torch.Tensor]]] = {direction: [] for direction in _DIRECTIONS}

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Note the runs of this model in here."""
        named = {plain_name(name): module for name, module in model.named_modules()}  # without wrappers
        hooks = [module.register_forward_hook(partial(self._note, name)) for name, module in named.items() if name]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def first(self, directions: tuple[str, ...]) -> FirstNotFinite | None:
        """Return this rank's first value that is not finite, with the last ones before it; None if all are finite."""
        for direction in directions:
            found = self._found[direction]
            values = torch.stack([size.float() for _, size in found]).tolist() if found else []
            at = next((at for at, value in enumerate(values) if not math.isfinite(value)), None)
            if at is not None:
                before = {name: values[number] for number, (name, _) in enumerate(found[:at])}
                return FirstNotFinite(found[at][0], direction, dict(list(before.items())[-_NUM_BEFORE:]))
        return None

    def _note(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1  # by checkpointing, within the backward
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
                continue
            if not is_recomputed:
                self._add("forward", name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._add, "backward", name))

    def _add(self, direction: str, name: str, tensor: torch.Tensor) -> None:
        self._found[direction].append((name, torch.linalg.vector_norm(tensor.detach(), math.inf)))
