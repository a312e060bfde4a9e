# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that is taken back: the actor's own optimizer and clipping, then everything as it was.

Weights, optimizer state and the options of its parameter groups come back bit for bit. Whoever calls this sets
gradients and random state aside.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...core.gradients import Gradient, GradientSpace
from ...core.sharding import local_shard
from ...search.weights import MovedWeights
from ..actor import Actor


@dataclass(frozen=True)
class StepTaken:
    """What a trial step did, the same on every rank."""

    is_taken: bool
    """False after a norm that is not finite: verl then takes no step either."""
    grad_norm: float
    """Before clipping."""
    clip_factor: float
    """What clipping multiplied the gradient with, in (0, 1]."""
    update_norm: float
    """L2 norm of how far the weights moved."""


@contextmanager
def trial_step(actor: Actor, space: GradientSpace, gradient: Gradient) -> Iterator[StepTaken]:
    """Context in which the actor's weights are those after a step with this gradient.

    Args:
        actor: whose optimizer and clipping it is. Stabilizers are left out, for they would learn from the step.
        space: the actor's parameters; ``.grad`` is scratch space and is left empty.
        gradient: local shards in host memory; a parameter without one is not updated.
    """
    with MovedWeights(space, torch.float32) as weights, kept_optimizer(actor.optimizer):
        _fill(space, gradient)
        norm = float(actor.clip().detach())
        if math.isfinite(norm):
            actor.optimizer.step()
        space.clear()
        space.reshard()
        clip_factor = min(1.0, actor.grad_clip / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        yield StepTaken(math.isfinite(norm), norm, clip_factor, weights.distance())


@contextmanager
def kept_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's state and options back bit for bit, whatever is done with it meanwhile.

    State that was moved away from its parameter's device, as verl's ``optimizer_offload`` does, is there for the
    duration.
    """
    options = [{key: copy.deepcopy(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
    entries = {param: dict(state) for param, state in optimizer.state.items()}
    copies = {param: _set_aside(param, optimizer.state[param]) for param in entries}
    try:
        yield
    finally:
        for group, saved in zip(optimizer.param_groups, options, strict=True):
            for key in set(group) - {"params", *saved}:
                del group[key]
            for key, value in saved.items():
                _put_back(group, key, value)
        for param in list(optimizer.state):
            if param not in entries:
                del optimizer.state[param]
                continue
            state = optimizer.state[param]
            state.clear()
            state.update(entries[param])
            for key, saved in copies[param].items():
                _put_back(state, key, saved)


@torch.no_grad()
def _set_aside(param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Copy what a step may change in place, to host memory; bring what lives elsewhere to the parameter."""
    copies = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            copies[key] = copy.deepcopy(value)
        elif value.dim() > 0 and value.device != param.device:
            state[key] = value.to(param.device)  # the original stays untouched
        else:
            copies[key] = local_shard(value).to("cpu", copy=True)
    return copies


@torch.no_grad()
def _put_back(state: dict[str, Any], key: str, saved: Any) -> None:
    if isinstance(state[key], torch.Tensor):
        local_shard(state[key]).copy_(saved)
    else:
        state[key] = saved


@torch.no_grad()
def _fill(space: GradientSpace, gradient: Gradient) -> None:
    """Make a copy of a gradient in host memory the content of ``.grad``."""
    space.reshard()
    for param, grad in zip(space.params, gradient, strict=True):
        param.grad = None
        if grad is not None:
            param.grad = torch.zeros_like(param)
            local_shard(param.grad).copy_(grad)
