# SPDX-License-Identifier: Apache-2.0
"""Localize one spike: propose and verify culprits, then certify. Knows tensors, ranks and a step; no trainer.

Whatever happens in here, the training gradient and the random state are put back bit for bit before returning.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ..core.gradients import GradientSpace
from ..core.probe import Prober
from ..core.ranks import Ranks
from ..core.selection import Token
from ..core.step import RngState, TrainingStep
from ..core.trigger import Spike
from ..record import Certificate, FirstNotFinite, Rerun
from .auto import auto, share
from .beside.first import first_not_finite
from .beside.triage import rerun, triage
from .bisect import bisect
from .sketch import sketch
from .task import Limit, SearchResult, Task

STRATEGIES = {"auto": auto, "share": share, "sketch": sketch, "bisect": bisect}

MAX_CULPRITS, MAX_STEPS, BUDGET = 8, 4.0, 128
"""Where nobody says otherwise: culprits, what a search may cost in updates, probes of the published bisection."""

_UNLIKELY = math.log(0.01)
_REHEARSAL_SHARE = 0.5  # on a step that does not spike: parts of at least half the norm that their weight predicts


@dataclass
class Finding:
    """Everything one localization found out; the same on every rank but for ``result.shares``."""

    strategy: str
    status: str
    """``found``, ``not_found``, or what ended the search though the rest still spikes: ``budget_exhausted`` or
    ``max_culprits``; both may have found some."""
    result: SearchResult
    certificate: Certificate
    tau: float
    num_forwards: int
    num_backwards: int
    seconds: float
    rerun: Rerun | None = None
    """The spike run again; None where that was not asked for."""
    first_not_finite: FirstNotFinite | None = None
    """Where in the model the gradient stops being finite; None where it is, or where the loss makes it so."""
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)
    """By micro-batch, where any rank has an unlikely culprit in it: entropies (B, T) of this rank's tokens, in nats."""

    @property
    def tokens(self) -> list[Token]:
        """All tokens of all culprits."""
        return self.result.tokens


def localize(
    step: TrainingStep,
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
) -> Finding:
    """Find and certify the culprits of the gradient that is in ``.grad``.

    Args:
        step: the step that produced it, ready to be replayed.
        space: the trainable parameters; ``.grad`` holds ``clip_scale`` times the gradient.
        ranks: the data-parallel ranks, all of which must call this together.
        spike: why, and the thresholds.
        clip_scale: the factor verl's clipping applied; in (0, 1].
        increments: estimate of each micro-batch's own gradient norm, where that was tracked.
        typical: numbers of the run's own steps, see :meth:`~.scale.ScaleHistory.typical`.
        strategy: one of ``STRATEGIES``.
        max_steps: the search costs at most so many of this run's own updates, in passes and in time.
        update_seconds: how long the step's micro-batches took; None: unknown.
        budget: largest number of probes of ``bisect``, which has no other limit; the certificate is not counted.
        max_culprits: stop after this many.
        reruns: run the spike again first; where it does not come back, nothing is searched.
    """
    started = time.perf_counter()
    rng = RngState(space.device)
    saved = space.take()
    prober = Prober(step, space, ranks)
    step = prober.step
    try:
        tau = spike.tau if spike.tau is not None else _rehearsal_tau(spike, step, ranks)
        limit = Limit(step.num_micro_batches, max_steps, update_seconds, budget if strategy == "bisect" else None)
        task = Task(prober, saved, clip_scale, spike, tau, max_culprits, limit, increments)
        reran = rerun(task) if reruns else None
        beside, first = triage(task, typical or {}, reran), None
        if beside is None and not math.isfinite(spike.grad_norm):
            first, broken = first_not_finite(task)
            task = replace(task, broken=broken)
        result = beside or STRATEGIES[strategy](task)
        certificate = result.certificate
        if certificate is None:
            certificate = task.certify(result.tokens)
        # bisection needs no forward alone, and does none
        holders = _with_unlikely(result, step, ranks) if strategy != "bisect" else []
        holders = holders if task.can_afford(forwards=len(holders), is_certificate=True) else []
        entropies = {index: prober.entropies(index) for index in holders}
        space.reshard()  # a forward without a backward leaves weights gathered that the next step would not see
    finally:
        space.put(saved)
        rng.restore()
    return Finding(
        strategy=strategy,
        status=_status(result),
        result=result,
        certificate=certificate,
        tau=tau,
        num_forwards=prober.num_forwards,
        num_backwards=prober.num_backwards,
        seconds=time.perf_counter() - started,
        rerun=reran,
        first_not_finite=first,
        entropies=entropies,
    )


def _with_unlikely(result: SearchResult, step: TrainingStep, ranks: Ranks) -> list[int]:
    """Micro-batches with an unlikely culprit that the loss makes likelier: whether the model was sure of another token
    is worth a forward there."""
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

    flags = ranks.max(ranks.agree(local)) if holders else []
    return [index for index, flag in zip(holders, flags, strict=True) if flag]


def _status(result: SearchResult) -> str:
    if result.exhausted:
        return "budget_exhausted"
    if result.is_cut:
        return "max_culprits"
    return "found" if result.culprits else "not_found"


def _rehearsal_tau(spike: Spike, step: TrainingStep, ranks: Ranks) -> float:
    """A per-token threshold for a step that has none: a share of the norm per unit of weight."""

    def local() -> float:
        return sum(step.token_weights(i).double().square().sum().item() for i in range(step.num_micro_batches))

    weight_norm = ranks.sum([ranks.agree(local)])[0] ** 0.5
    return _REHEARSAL_SHARE * spike.grad_norm / weight_norm if weight_norm > 0 else 1.0
