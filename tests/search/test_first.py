# SPDX-License-Identifier: Apache-2.0
"""The first module that is not finite is the same however its activations are kept; the hooks leave nothing behind."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradloc.search.beside.first import _Sizes

WAYS = ("forward", "backward")


class Grows(torch.autograd.Function):
    """Times one factor forward, times another backward."""

    @staticmethod
    def forward(ctx, values, forth, back):
        ctx.back = back
        return values * forth

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.back, None, None


class Block(torch.nn.Module):
    def __init__(self, forth: float, back: float):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.factors = forth, back

    def forward(self, values):
        return values + self.down(Grows.apply(self.up(values), *self.factors)), None


class Model(torch.nn.Module):
    def __init__(self, factors, reentrant: bool | None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(*of_block) for of_block in factors)
        self.head = torch.nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, values):
        for block in self.blocks:
            kept = self.reentrant is None
            values, _ = block(values) if kept else checkpoint(block, values, use_reentrant=self.reentrant)
        return self.head(values)


def looked_at(factors, reentrant=None):
    model, sizes = Model(factors, reentrant), _Sizes()
    with sizes.of(model):
        values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(values).sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    return model, sizes


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize(
    ("factors", "module", "way"),
    [
        ([(1.0, 1.0), (math.inf, 1.0), (1.0, 1.0)], "blocks.1.down", "forward"),
        ([(1.0, 1.0), (1.0, math.inf), (1.0, 1.0)], "blocks.1.up", "backward"),
        ([(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], None, None),
    ],
    ids=["forward", "backward", "finite"],
)
def test_it_is_named_with_what_came_before_it(factors, module, way, reentrant):
    model, sizes = looked_at(factors, reentrant)
    first = sizes.first(WAYS)
    assert (first and (first.module, first.way)) == (module and (module, way))
    if way == "forward":
        assert list(first.before) == ["blocks.0.down", "blocks.0", "blocks.1.up"]
        values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
        assert first.before["blocks.0"] == pytest.approx(float(model.blocks[0](values)[0].abs().max()))
    if way == "backward":
        assert list(first.before)[-1] == "blocks.1.down" and all(map(math.isfinite, first.before.values()))


def test_outputs_that_are_infinite_on_purpose_are_passed_over_where_the_forward_is_known_to_be_finite():
    _, sizes = looked_at([(math.inf, math.inf)])
    assert sizes.first(WAYS).way == "forward" and sizes.first(WAYS[1:]).way == "backward"
