# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences and removal of padding in plain torch, without flash attention."""

from collections.abc import Callable
from typing import Any

import torch

from verl.models.transformers import monkey_patch
from verl.utils import npu_flash_attn_utils


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    *,
    position_ids: torch.Tensor,
    softmax_scale: float | None,
    **_: Any,
) -> torch.Tensor:
    """Compute causal attention (1, S, H, D) over packed sequences; each starts where the position is 0."""
    sequence = (position_ids[0] == 0).cumsum(0)
    order = torch.arange(len(sequence))
    seen = (sequence.unsqueeze(1) == sequence) & (order.unsqueeze(1) >= order)
    heads = [part.transpose(1, 2) for part in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=seen, scale=softmax_scale, enable_gqa=heads[0].shape[1] != heads[1].shape[1]
    )
    return out.transpose(1, 2)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **_):
    """Implement transformers' interface, (B, H, S, D) to (B, S, H, D), with verl's Ulysses exchange around it."""
    parts = [part.transpose(1, 2) for part in (query, key, value)]
    out = monkey_patch._ulysses_flash_attention_forward(
        *parts, None, query.shape[2], position_ids=position_ids, softmax_scale=scaling
    )
    return out, None


def padding_functions() -> tuple[Callable, ...]:
    """Return verl's padding functions for Ascend: index_first_axis, pad_input, rearrange, unpad."""
    found = npu_flash_attn_utils
    return found.index_first_axis, found.pad_input, found.rearrange, found.unpad_input
