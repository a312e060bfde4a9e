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
"""Localize one spike: propose and verify culprits, then certify. Knows tensors, ranks and a step; no trainer.

Whatever happens in here, the training gradient and the random state are put back bit for bit before returning.
"""

import time
from dataclasses import dataclass

from ..core.certificate import Certificate, certify
from ..core.gradients import GradientSpace
from ..core.probe import Prober, RngState, TrainingStep
from ..core.ranks import Ranks
from ..core.selection import Token
from ..core.trigger import Spike
from .auto import auto, share
from .bisect import bisect
from .sketch import sketch
from .task import SearchResult, Task

__all__ = ["Finding", "STRATEGIES", "localize"]

STRATEGIES = {"auto": auto, "share": share, "sketch": sketch, "bisect": bisect}

_REHEARSAL_SHARE = 0.5  # on a step that does not spike: open parts that carry half of what their weight predicts


@dataclass
class Finding:
    """Everything one localization found out; the same on every rank but for ``result.shares``."""

    strategy: str
    status: str
    """``found``, ``not_found`` or ``budget_exhausted`` (which may still have found some)."""
    result: SearchResult
    certificate: Certificate
    tau: float
    num_forwards: int
    num_backwards: int
    seconds: float

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
    *,
    strategy: str = "auto",
    budget: int = 128,
    max_culprits: int = 8,
) -> Finding:
    """Find and certify the culprits of the gradient that is in ``.grad``.

    Args:
        step: the step that produced it, ready to be replayed.
        space: the trainable parameters; ``.grad`` holds ``clip_scale`` times the gradient.
        ranks: the data-parallel ranks, all of which must call this together.
        spike: why, and the thresholds.
        clip_scale: the factor verl's clipping applied; in (0, 1].
        increments: estimate of each micro-batch's own gradient norm, where that was tracked.
        strategy: one of ``STRATEGIES``.
        budget: largest number of probes of the search; the certificate is not counted.
        max_culprits: stop after this many.
    """
    started = time.perf_counter()
    rng = RngState(space.params[0].device)
    saved = space.take()
    prober = Prober(step, space, ranks)
    try:
        tau = spike.tau if spike.tau is not None else _rehearsal_tau(spike, step, ranks)
        result = STRATEGIES[strategy](Task(prober, saved, clip_scale, spike, tau, budget, max_culprits, increments))
        certificate = result.certificate
        if certificate is None:
            certificate = certify(prober, saved, clip_scale, spike.grad_norm, spike.threshold, result.tokens)
    finally:
        space.put(saved)
        rng.restore()
    return Finding(
        strategy=strategy,
        status="budget_exhausted" if result.exhausted else "found" if result.culprits else "not_found",
        result=result,
        certificate=certificate,
        tau=tau,
        num_forwards=prober.num_forwards,
        num_backwards=prober.num_backwards,
        seconds=time.perf_counter() - started,
    )


def _rehearsal_tau(spike: Spike, step: TrainingStep, ranks: Ranks) -> float:
    """A per-token threshold for a step that has none: a share of the norm per unit of weight."""

    def local() -> float:
        return sum(step.token_weights(i).double().square().sum().item() for i in range(step.num_micro_batches))

    weight_norm = ranks.sum([ranks.agree(local)])[0] ** 0.5
    return _REHEARSAL_SHARE * spike.grad_norm / weight_norm if weight_norm > 0 else 1.0
