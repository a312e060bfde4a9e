# SPDX-License-Identifier: Apache-2.0
"""Kernels that do not repeat: what atomics in flash attention's and the embedding's backward do to a gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.toy_model.model import Block

_ULP = 2.0**-8  # of bfloat16, relative to a number's power of two


@contextmanager
def unrepeatable(model: torch.nn.Module, share: float, seed: int = 0) -> Iterator[None]:
    """Context in which every backward is a little different, fresh each time; forwards are what they were.

    The gradient of every attention output and of the embedding's output is rounded to bfloat16, and a share of its
    elements is one unit in the last place off, up or down. Draws from a generator of its own.

    Args:
        model: a bare decoder, sharded or not.
        share: of the elements, in [0, 1].
        seed: differs between ranks where they are to differ.
    """
    if share == 0:
        yield
        return
    generator = torch.Generator().manual_seed(seed)

    def noise(grad: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(grad.shape, generator=generator).to(grad.device)
        sign = torch.where(drawn < share / 2, -1.0, torch.where(drawn < share, 1.0, 0.0))
        rounded = grad.to(torch.bfloat16).float()
        _, exponent = torch.frexp(rounded)  # |grad| = m * 2**exponent with m in [0.5, 1)
        unit = torch.where(rounded == 0, 0.0, torch.ldexp(torch.full_like(drawn, _ULP), exponent))
        return (rounded + sign * unit).to(grad.dtype)

    def before(module: torch.nn.Module, inputs: tuple) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(noise)

    def after(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(noise)

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    handles = [block.out.register_forward_pre_hook(before) for block in blocks]
    handles += [m.register_forward_hook(after) for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
