# SPDX-License-Identifier: Apache-2.0
"""Add to a backward on its way: losses that no log-prob shows, as routers have them, and an overflow."""

from typing import Any

import torch


class AddLoss(torch.autograd.Function):
    """Lets a value pass and adds a loss's gradient on the way back: how such a loss reaches a trainer that builds its
    own from the logits alone."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.gradient = torch.ones_like(loss)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, ctx.gradient


class Overflow(torch.autograd.Function):
    """Nothing forward; backward a gradient beyond what float32 holds."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1e30 * 1e30


def add_router_loss(model: torch.nn.Module, factor: float) -> None:
    """A loss of a bare decoder's second layer's own, which no log-prob shows."""

    def hook(mlp: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return AddLoss.apply(output, factor * mlp.gate(inputs[0]).square().mean())

    model.blocks[1].mlp.register_forward_hook(hook)
