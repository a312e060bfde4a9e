# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that is taken back: the actor's own optimizer and clipping, then everything as it was.

Weights, optimizer state and the options of its parameter groups come back bit for bit. The caller sets gradients and
random state aside.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...core.gradients import Gradient, GradientSpace
from ...core.sharding import local_shard
from ...record.analysis import Update
from ...search.weights import MovedWeights
from ..actor import Actor


@contextmanager
def trial_step(actor: Actor, space: GradientSpace, gradient: Gradient) -> Iterator[Update]:
    """Context in which the actor's weights are those after a step with this gradient; as in verl, none is taken where
    its norm is not finite.

    Args:
        actor: whose optimizer and clipping it is. Stabilizers are left out, for they would learn from the step.
        space: the actor's parameters; ``.grad`` is scratch space and is left empty.
        gradient: local shards in host memory; a parameter without one is not updated.
    """
    with MovedWeights(space, torch.float32) as weights, kept_optimizer(actor.optimizer):
        space.put([None if grad is None else grad.clone() for grad in gradient])  # clipped in place
        norm = float(actor.clip().detach())
        if math.isfinite(norm):
            actor.optimizer.step()
        space.clear()
        space.reshard()
        clip_factor = min(1.0, actor.grad_clip / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        yield Update(
            is_taken=math.isfinite(norm), grad_norm=norm, clip_factor=clip_factor, update_norm=weights.distance()
        )


@contextmanager
def kept_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's state and options back bit for bit; what verl has offloaded is on the device meanwhile."""
    options = [dict(group) for group in optimizer.param_groups]
    entries = {param: dict(state) for param, state in optimizer.state.items()}
    saved = []
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.dim() > 0 and value.device != param.device:
                state[key] = value.to(param.device)  # the step changes this copy
            else:
                saved.append((value, local_shard(value).to("cpu", copy=True)))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, copied in saved:
                local_shard(value).copy_(copied)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(entries)
