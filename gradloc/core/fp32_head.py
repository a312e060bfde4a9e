# SPDX-License-Identifier: Apache-2.0
"""Logits in float32 from the last hidden state of a model that computes in half precision.

Where the device has them, in its tensor cores: products of half precision are exact there, and their sums float32's.
"""

import torch

from .memory_plans import PART


def precise_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` of hidden states (..., H) and weights (V, H) of any precision: float32 (..., V), no graph."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    if _has_wide_product(rows, weight):
        out = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:  # with a float32 copy of a part of the weight at a time
        out = torch.empty(len(rows), len(weight), dtype=torch.float32, device=rows.device)
        num_words = max(PART // weight.shape[1], 1)
        for first in range(0, len(weight), num_words):
            part = slice(first, first + num_words)
            torch.mm(rows.float(), weight[part].float().T, out=out[:, part])
    if bias is not None:
        out += bias.float()
    return out.view(*hidden.shape[:-1], len(weight))


_wide_products: dict[tuple[str, torch.dtype], bool] = {}


def _has_wide_product(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether half-precision operands can be multiplied into float32 here: asked once of each kind of device."""
    if rows.dtype != weight.dtype or rows.dtype not in (torch.bfloat16, torch.float16):
        return False
    key = rows.device.type, rows.dtype
    if key not in _wide_products:
        one = torch.ones(16, 16, dtype=rows.dtype, device=rows.device)
        try:
            _wide_products[key] = torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32
        except (NotImplementedError, RuntimeError, TypeError):  # a CPU; torch before 2.8
            _wide_products[key] = False
    return _wide_products[key]
