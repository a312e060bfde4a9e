# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism where flash attention is not installed: verl's own exchange around an attention on CPU."""

from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def attention_of_verl():
    """The model's attention is verl's, which swaps sequence for heads before and after flash attention's function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from verl.models.transformers import monkey_patch

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **_):
        parts = [part.transpose(1, 2) for part in (query, key, value)]
        out = monkey_patch._ulysses_flash_attention_forward(
            *parts, None, query.shape[2], position_ids=position_ids, softmax_scale=scaling
        )
        return out, None

    patch = mock.patch.object(monkey_patch, "_flash_attention_forward", packed_attention)
    with patch, plain_padding(), mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}):
        yield


@contextmanager
def plain_padding():
    """verl's remove_padding where flash attention is not installed: its own functions for Ascend, in plain torch."""
    from verl.utils import attention_utils, npu_flash_attn_utils

    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    functions = tuple(getattr(npu_flash_attn_utils, name) for name in names)
    with mock.patch.object(attention_utils, "_get_attention_functions", lambda: functions):
        yield


def packed_attention(query, key, value, attention_mask, query_length, *, position_ids, softmax_scale, **_):
    """Causal attention (1, S, H, D) over sequences end to end: a new one begins where the position is 0."""
    sequence = (position_ids[0] == 0).cumsum(0)
    order = torch.arange(len(sequence))
    seen = (sequence.unsqueeze(1) == sequence) & (order.unsqueeze(1) >= order)
    heads = [part.transpose(1, 2) for part in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=seen, scale=softmax_scale, enable_gqa=heads[0].shape[1] != heads[1].shape[1]
    )
    return out.transpose(1, 2)
