# SPDX-License-Identifier: Apache-2.0
"""Searches on a bare model. :func:`task_of` makes what every strategy is given."""

import math

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search.limit import Limit
from gradloc.search.task import Task
from tests.bare import BareStep, Batch, Loss, Place, build, random_batch, shard

NUM_MICRO_BATCHES = 4


def task_of(
    plants: dict[Place, float],
    threshold: float = 20.0,
    max_steps: float = math.inf,
    loss: Loss = Loss(),  # noqa: B008
) -> tuple[Task, Batch]:
    """A trained step with planted advantages on one process, as a task, and its batch; healthy norms are near 1."""
    batch = random_batch(build("tiny")).planted(plants)
    step = BareStep(shard(build("tiny"), "plain"), batch, NUM_MICRO_BATCHES, loss=loss)
    space = GradientSpace(step.model)
    step.train()
    norm, tau = space.norm(), threshold * batch.num_tokens**0.5
    spike = Spike("fixed", norm, threshold, tau, batch.num_tokens)
    limit = Limit(NUM_MICRO_BATCHES, max_steps)
    return Task(Prober(step, space, Ranks()), space.take(), 1.0, spike, tau, 8, limit), batch
