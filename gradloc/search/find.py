# SPDX-License-Identifier: Apache-2.0
"""Localize one spike: ask what else may have made it, search its tokens, certify.

Whatever happens, the training gradient and the random state are put back bit for bit, so the run goes on as without a
search.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ..core.certificate import verdict_of
from ..core.gradients import GradientSpace
from ..core.host_step import HostStep
from ..core.probe import Prober
from ..core.ranks import Ranks
from ..core.step import Groups, TrainingStep
from ..record import Certificate, Fault, Rerun
from ..trigger import Spike
from .auto import auto, share
from .bisect import bisect
from .cures import try_cures
from .limit import BUDGET, MAX_CULPRITS, MAX_CURES, MAX_STEPS, PROBE, Limit
from .overflow import rescale_task, to_training_unit
from .step_causes import (
    fault_result,
    find_batch_independent_cause,
    find_loss_cause,
    first_not_finite,
    make_unsearched,
    rerun,
    scaled_batch,
)
from .task import SearchResult, Task

LinkFinder = Callable[[Task], tuple[SearchResult | None, Fault]]
_METHODS = {"auto": auto, "share": share, "bisect": bisect}

_UNLIKELY = math.log(0.01)  # log-prob of a token that was sampled against the odds
_OF_LOSS = ("batch_scale",)
"""Causes that are not tokens and yet come from the loss, so that its settings may heal them."""
_AFTER_BACKWARD = ("gradient_changed", "gradient_scaled")


def localize(
    step: TrainingStep | HostStep,
    space: GradientSpace,
    ranks: Ranks,
    spike: Spike,
    clip_scale: float,
    increments: list[float] | None = None,
    typical: Mapping[str, tuple[float, float]] | None = None,
    *,
    strategy: str = "auto",
    max_steps: float = MAX_STEPS,
    update_seconds: float | None = None,
    budget: int = BUDGET,
    max_culprits: int = MAX_CULPRITS,
    reruns: bool = False,
    max_cures: int = MAX_CURES,
    groups: Groups | None = None,
    find_link: LinkFinder | None = None,
    squares: torch.Tensor | None = None,
) -> SearchResult:
    """Find and certify the culprits of the gradient in ``.grad``. All ranks call this together.

    Args:
        step: the step that produced it, ready to be replayed.
        space: the trainable parameters; ``.grad`` holds ``clip_scale`` times the gradient.
        ranks: the data-parallel ranks.
        spike: why the step is searched, and the thresholds.
        clip_scale: the factor that clipping applied; in (0, 1].
        increments: about the norm of each micro-batch's own gradient; None if it was not tracked.
        typical: what is usual in this run, from :meth:`..trigger.history.ScaleHistory.typical`.
        strategy: one of ``STRATEGIES``.
        max_steps: limit of the search in this run's own updates, both in passes and in time.
        update_seconds: how long the step's micro-batches took; None if unknown.
        budget: limit of ``bisect`` in probes, its only one; the certificate is not counted.
        max_culprits: stop after this many.
        reruns: run the spike again first, and search nothing if it does not come back.
        max_cures: the most other settings to measure; 0: none, nor are their coefficients computed.
        groups: how the batch's advantages were made, for settings that change them.
        find_link: finds which link broke, and gives a result where that is not the batch; None: the batch is taken
            for it.
        squares: squared norm of each parameter's ``.grad``, float64 (num_params,); None: measured here.
    """
    started = time.perf_counter()
    rng, saved = space.forward_state(), space.take()
    prober = Prober(step, space, ranks)
    held = prober.step
    prober.num_forwards, prober.num_backwards = held.spent
    try:
        squares = space.squares(saved) if squares is None else squares
        searched, square = saved, sum(squares.tolist()) / clip_scale**2
        if outside := set(held.unsearched):
            searched = [None if name in outside else grad for name, grad in zip(space.names, saved, strict=True)]
            kept = zip(space.names, squares.tolist(), strict=True)
            square = sum(value for name, value in kept if name not in outside) / clip_scale**2
            spike = replace(spike, grad_norm=square**0.5)
        tau = spike.tau if spike.tau is not None else _rehearsal_tau(spike, held, ranks)
        limit = Limit(held.num_micro_batches, max_steps, update_seconds, budget if strategy == "bisect" else None)
        task = Task(prober, searched, clip_scale, spike, tau, max_culprits, limit, increments)
        task = replace(task, usual_coefficient=(typical or {}).get("coefficient"), square=square)
        result = _find(task, strategy, typical or {}, reruns, find_link)
        _complete(task, result, strategy, max_cures, groups)
    finally:
        try:
            space.reshard()  # weights gathered by a forward alone would outlive the optimizer's step
        finally:
            space.put(saved)
            rng.restore()
    result.seconds = time.perf_counter() - started
    return result


def _complete(task: Task, result: SearchResult, strategy: str, max_cures: int, groups: Groups | None) -> None:
    """Certify what was found unless the strategy did, measure entropies and cures, and note what all of it cost."""
    prober, step = task.prober, task.prober.step
    if result.certificate is None:
        result.certificate = task.certify(result.tokens)
        is_left = bool(result.tokens) and strategy != "bisect" and max_cures > 0
        result.rest = prober.space.keep() if is_left else None
    if outside := step.unsearched_norm:
        result.certificate = _without(result.certificate, outside, step.unsearched)
    elif step.apart:
        result.certificate = _with_error(result.certificate, step.apart, step.obstacle)
    if strategy != "bisect":  # which has no memory for forwards
        result.entropies = _entropies_of_unlikely(task, result)
    is_of_loss = result.source is None or result.source.label in _OF_LOSS
    if max_cures > 0 and result.first_not_finite is None and is_of_loss:
        result.cures = try_cures(task, result, groups, max_cures)
    result.strategy, result.tau, result.rest = strategy, task.tau, None
    result.num_forwards = prober.num_forwards - sum(cured.forwards for cured in result.cures or ())
    result.num_backwards = prober.num_backwards - sum(cured.backwards for cured in result.cures or ())


def _find(
    task: Task, strategy: str, typical: Mapping[str, tuple[float, float]], reruns: bool, find_link: LinkFinder | None
) -> SearchResult:
    """Ask what made the spike: a broken link of the step, the loss as a whole, or tokens; return the first answer."""
    search, first = _METHODS[strategy], None
    objection = task.prober.step.objection
    reran = rerun(task) if reruns and not objection else None
    task = replace(task, reran=reran)
    result, fault = _link(task, objection, reran, find_link)
    result = result or find_loss_cause(task, typical)
    if result is None and not math.isfinite(task.spike.grad_norm):
        overflow = rescale_task(task) if strategy != "bisect" else None  # which has no memory for another gradient
        if overflow is None:
            first, broken = first_not_finite(task)
            task = replace(task, broken=broken)
        else:
            result = to_training_unit(overflow, scaled_batch(overflow, typical) or search(overflow))
    result = result or search(task)
    result.rerun, result.first_not_finite, result.fault = reran, first, _fault_with(result, fault)
    return result


def _link(
    task: Task, objection: str, reran: Rerun | None, find_link: LinkFinder | None
) -> tuple[SearchResult | None, Fault | None]:
    """Return which link of the step broke; and the result, where that is not the batch."""
    if objection:
        fault = task.prober.step.fault
        result = make_unsearched(task, objection)
        return (fault_result(task, fault, result.path) if fault is not None and fault.label else result), fault
    broken = find_batch_independent_cause(task, reran)
    if broken is not None or find_link is None:
        return broken, None
    cost, started = task.prober.cost, time.perf_counter()
    found = find_link(task)
    spent, seconds = task.prober.cost - cost, time.perf_counter() - started
    # one micro-batch of an earlier step, which a search is not to miss
    task.limit.allow(min(spent, PROBE), seconds * min(PROBE / max(spent, 1), 1.0))
    return found


def _fault_with(result: SearchResult, found: Fault | None) -> Fault | None:
    """Return the fault with what the search itself found out after it was looked for."""
    source = result.source
    if source is None or source.label not in _AFTER_BACKWARD or (found is not None and found.at == "after_backward"):
        return found
    step = None if found is None else found.step
    return Fault("after_backward", source.label, source.names, step, dict(source.numbers), source.reason)


def _without(found: Certificate, outside: float, names: Sequence[str]) -> Certificate:
    """Leave a certificate's verdict open, since a part of the gradient was not searched."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    why = (
        f"the gradient of {names[0]}{more}, of norm {outside:.3g}, was not searched: it is used outside of the model's "
        "forward, or behind its last hidden state where dL/dlogits neither follow from log-probs nor fitted into "
        f"keep_gb; without that part the norm is {found.norm_before:.3g} with the culprits"
    )
    why += f" and {found.norm_after:.3g} without them" if found.norm_after is not None else ""
    return replace(found, norm_after=None, error_bound=None, verdict="undecided", reason=why)


def _with_error(found: Certificate, error: float, why: str) -> Certificate:
    """Widen a certificate's bound by how far the gradient that was searched is from the one that training made.

    Args:
        found: the certificate.
        error: norm of the difference, before clipping.
        why: the sentence on a difference that is more than rounding.
    """
    if found.error_bound is None or found.norm_after is None or found.method == "none":
        return found
    bound = found.error_bound + error
    verdict, reason = verdict_of(found.norm_after, bound, found.threshold)
    return replace(found, error_bound=bound, verdict=verdict, reason="; ".join(filter(None, (reason, why))))


def _entropies_of_unlikely(task: Task, result: SearchResult) -> dict[int, torch.Tensor]:
    """Return the entropies (B, T), by micro-batch that holds an unlikely culprit that the loss makes likelier.

    They show whether the model was sure of another token, a cause worth a forward. A coefficient under 0 raises the
    log-prob, since the step goes against the gradient.
    """
    prober, step, ranks = task.prober, task.prober.step, task.prober.ranks
    holders = sorted({token.micro_batch for token in result.tokens})

    def local() -> list[float]:
        found = dict.fromkeys(holders, 0.0)
        for token in result.tokens:
            index = token.micro_batch
            if token.rank == ranks.rank and not step.recorded(index).is_value:
                mask = step.token_mask(index)
                is_unlikely = step.recorded(index).log_prob[mask][token.index] < _UNLIKELY
                is_raised = step.coefficients(index)[0][mask][token.index] < 0
                found[index] = max(found[index], float(is_unlikely and is_raised))
        return list(found.values())

    flags = ranks.max(ranks.run_local_synced(local)) if holders else []
    indices = [index for index, flag in zip(holders, flags, strict=True) if flag]
    if not task.can_afford(forwards=len(indices), is_certificate=True):
        return {}
    known = {index: prober.entropies(index) for index in indices}
    return {index: values for index, values in known.items() if values is not None}


def _rehearsal_tau(spike: Spike, step: HostStep, ranks: Ranks) -> float:
    """Return tau for a step without a threshold: half of the norm per unit of the tokens' weight; 1 without weight."""

    def local() -> float:
        return sum(step.token_weights(i).double().square().sum().item() for i in range(step.num_micro_batches))

    weight_norm = ranks.sum([ranks.run_local_synced(local)])[0] ** 0.5
    return spike.grad_norm / (2 * weight_norm) if weight_norm > 0 else 1.0
