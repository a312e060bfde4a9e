# SPDX-License-Identifier: Apache-2.0
"""Searches on a bare model. :func:`trained` and :func:`spike_of` make a step that spikes, :func:`task_of` what every
strategy is given of one."""

import math
from collections.abc import Callable

import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.search.limit import Limit
from gradloc.search.task import Task
from gradloc.trigger import Spike
from tests.toy_model import Batch, Loss, Place, ToyStep, build, random_batch, shard

NUM_MICRO_BATCHES = 4


def trained(
    batch: Batch,
    dtype: torch.dtype = torch.float32,
    loss: Loss = Loss(),  # noqa: B008
    model: torch.nn.Module | None = None,
    note: Callable[[GradientSpace], None] = lambda space: None,
    num_micro_batches: int = NUM_MICRO_BATCHES,
) -> tuple[ToyStep, GradientSpace]:
    """A step of this batch on one process, whose gradient is in ``.grad``; ``note`` is called after each backward."""
    step = ToyStep(shard(model or build("tiny"), "plain", dtype), batch, num_micro_batches, dtype, loss)
    space = GradientSpace(step.model)
    step.train(lambda: note(space))
    return step, space


def spike_of(batch: Batch, norm: float, threshold: float) -> Spike:
    """A norm of this batch's step, over a fixed threshold or not finite; healthy norms are near 1."""
    kind = "fixed" if math.isfinite(norm) else "non_finite"
    return Spike(kind, norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)


def task_of(
    plants: dict[Place, float],
    threshold: float = 20.0,
    max_steps: float = math.inf,
    loss: Loss = Loss(),  # noqa: B008
) -> tuple[Task, Batch]:
    """A trained step with planted advantages on one process, as a task, and its batch."""
    batch = random_batch(build("tiny")).planted(plants)
    step, space = trained(batch, loss=loss)
    spike, limit = spike_of(batch, space.norm(), threshold), Limit(NUM_MICRO_BATCHES, max_steps)
    return Task(Prober(step, space, Ranks()), space.take(), 1.0, spike, spike.tau, 8, limit), batch
