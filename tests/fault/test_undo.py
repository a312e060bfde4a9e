# SPDX-License-Identifier: Apache-2.0
"""The last step of an optimizer undone from its state gives back the weights before it."""

from typing import Any

import pytest
import torch
from torch import nn

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.fault.updates import Updates

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.3),
    "adamw_fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "adam_decay": lambda params: torch.optim.Adam(params, 1e-2, weight_decay=0.3),
    "amsgrad": lambda params: torch.optim.AdamW(params, 1e-2, amsgrad=True),
    "tensor_rate": lambda params: torch.optim.AdamW(params, torch.tensor(1e-2)),
    "momentum": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, weight_decay=0.1),
}
UNKNOWN: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 1e-2),
    "nesterov": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda params: torch.optim.NAdam(params, 1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-2),
}


def trained(make: Any, steps: int, undo: Any = None) -> tuple[nn.Module, Updates, list[torch.Tensor]]:
    """Return a model, what was noted of its steps, and its weights before the last one."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer, updates = make(model.parameters()), Updates(undo)
    space = GradientSpace(model, Ranks(None))
    before: list[torch.Tensor] = []
    for _ in range(steps):
        updates.follow(optimizer, space)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        updates.note_weights()
        updates.learn(torch.stack(updates.open) if updates.open else torch.zeros(0))
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        for group in optimizer.param_groups:  # as a scheduler does behind the step
            group["lr"] = group["lr"] * 0.5
    return model, updates, before


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_before_come_back(name, steps):
    model, updates, before = trained(OPTIMIZERS[name], steps)
    for index, (param, expected) in enumerate(zip(model.parameters(), before, strict=True)):
        found = updates.before_last(index, param.detach(), updates.num_steps()[index])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert updates.is_undone(index, param.detach(), found)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_optimizer_that_is_not_known_is_not_undone_wrongly(name):
    model, updates, _ = trained(UNKNOWN[name], 5)
    for index, param in enumerate(model.parameters()):
        found = updates.before_last(index, param.detach(), updates.num_steps()[index])
        assert found is None or not updates.is_undone(index, param.detach(), found)


def test_a_function_that_is_handed_over_undoes_it():
    make = UNKNOWN["rmsprop"]
    model, updates, before = trained(make, 5)
    known = dict(zip([id(param) for param in model.parameters()], before, strict=True))
    queue = [known[id(param)] for param in model.parameters()]
    updates.undo = lambda weight, state, group: queue.pop(0)
    for index, param in enumerate(model.parameters()):
        assert updates.is_undone(
            index, param.detach(), updates.before_last(index, param.detach(), updates.num_steps()[index])
        )


def test_a_parameter_without_a_gradient_stays():
    model, updates, _ = trained(OPTIMIZERS["adamw"], 3)
    assert updates.last is not None
    updates.last.skipped = frozenset({1})
    weight = list(model.parameters())[1].detach()
    assert torch.equal(updates.before_last(1, weight, updates.num_steps()[1]), weight)


def test_the_weights_under_another_decay_are_those_of_a_step_with_it():
    model, updates, before = trained(OPTIMIZERS["adamw"], 5)
    other, _, _ = trained(lambda params: _decays_less_at_last(params), 5)
    for index, (param, there) in enumerate(zip(model.parameters(), before, strict=True)):
        found = updates.under_decay(index, param.detach(), there, 0.1)
        torch.testing.assert_close(found, list(other.parameters())[index].detach(), rtol=1e-5, atol=1e-6)


def _decays_less_at_last(params: Any) -> torch.optim.Optimizer:
    optimizer, steps = OPTIMIZERS["adamw"](params), iter(range(5))

    def before_step(*_: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 if next(steps) == 4 else 0.3

    optimizer.register_step_pre_hook(before_step)
    return optimizer
