# SPDX-License-Identifier: Apache-2.0
"""Losses that pass through no token's log-prob, as routers of experts have them."""

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


def add_router_loss(model: torch.nn.Module, factor: float) -> None:
    """A loss of a bare decoder's second layer's own, which no log-prob shows."""

    def hook(mlp: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return AddLoss.apply(output, factor * mlp.gate(inputs[0]).square().mean())

    model.blocks[1].mlp.register_forward_hook(hook)
