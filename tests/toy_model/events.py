# SPDX-License-Identifier: Apache-2.0
"""From a bare step to the event on disk: train, search, gather and complete, as actor and driver do it together."""

import math
from collections.abc import Callable
from typing import Any

import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.host_step import HostStep
from gradloc.core.ranks import Ranks
from gradloc.loop.batch import BatchView
from gradloc.loop.fingerprint import own_weight_sums
from gradloc.loop.gather import SpikeContext, raw_event
from gradloc.loop.layers import head_square
from gradloc.loop.writer import EventEnricher, complete_event
from gradloc.record import Action, Event, Run, Step
from gradloc.search.find import localize
from gradloc.trigger import Spike
from tests.toy_model import Batch, ToyStep


def context_of(
    step: ToyStep,
    batch: Batch,
    threshold: float,
    typical: dict[str, tuple[float, float]] | None = None,
    history: list[ToyStep] = (),
    corrupt: Callable[[GradientSpace], None] = lambda space: None,
    **settings: Any,
) -> SpikeContext:
    """Train the step and search its spike.

    Args:
        step: of one process.
        batch: what the driver holds, before anything that only the actor's loss knows.
        threshold: from which a norm is a spike.
        typical: of the run.
        history: healthy steps on the same model, for the norms per layer.
        corrupt: done to the gradient after the backward.
        settings: of the search.
    """
    space, ranks = GradientSpace(step.model), Ranks()
    squares = []
    for healthy in history:
        healthy.train()
        squares.append(space.squares())
        space.clear()
    step.train()
    corrupt(space)
    norm = space.norm()
    assert not norm <= threshold, norm
    kind = "fixed" if math.isfinite(norm) else "non_finite"
    spike = Spike(kind, norm, threshold, threshold * batch.num_tokens**0.5, batch.num_tokens)
    return SpikeContext(
        place=Step(1, 0, 0, 1),
        spike=spike,
        finding=localize(step, space, ranks, spike, 1.0, None, typical, **settings),
        step=HostStep(step, space.device),
        space=space,
        ranks=ranks,
        squares=space.squares(),
        weight_sums=space.reduce(lambda: own_weight_sums(space)),
        history=torch.stack(squares) if squares else None,
        action=Action("observe", "observe", ""),
        clip_limit=1.0,
        checkpoint=None,
        head_square=float(head_square(space)),
    )


def event_of(
    step: ToyStep, batch: Batch, threshold: float, of_rollout: dict[str, torch.Tensor] | None = None, **more: Any
) -> Event:
    """The completed record of a step's spike, see :func:`context_of`.

    ``of_rollout`` are the driver's (R, T) of the rollout: ``rollout_is_weights``, ``rollout_log_probs``.
    """
    raw = raw_event(context_of(step, batch, threshold, **more))
    assert raw is not None
    return complete_event(raw, "event", Run(), EventEnricher(_view(batch, of_rollout or {}), None, 8))


def _view(batch: Batch, of_rollout: dict[str, torch.Tensor]) -> BatchView:
    """The batch under verl's names."""
    num_prompt = batch.tokens.shape[1] + 1 - batch.labels.shape[1]
    prompt = batch.tokens[:, :num_prompt]
    tensors = {
        "input_ids": torch.cat([prompt, batch.labels], 1),
        "attention_mask": torch.cat([torch.ones_like(prompt), batch.mask.long()], 1),
        "responses": batch.labels,
        "response_mask": batch.mask.long(),
        "old_log_probs": batch.old_log_probs,
        "ref_log_prob": batch.reference_log_probs,
        "advantages": batch.advantages,
    }
    return BatchView(tensors | of_rollout, {})
