# SPDX-License-Identifier: Apache-2.0
"""Sequences end to end, and parts of one on several ranks, where flash attention is not installed.

Load it with `VERL_USE_EXTERNAL_MODULES=experiments.layouts.sequences` and ask for
`actor_rollout_ref.model.override_config.attn_implementation=packed_cpu`. verl's own exchange of sequence for heads
(Ulysses) runs around an attention in plain torch; padding is taken out by what verl has for Ascend, in plain torch.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from verl.models.transformers import monkey_patch
from verl.utils import attention_utils, npu_flash_attn_utils

NAME = "packed_cpu"


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


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **_):
    """transformers' interface: (B, H, S, D) in, (B, S, H, D) out."""
    parts = [part.transpose(1, 2) for part in (query, key, value)]
    out = monkey_patch._ulysses_flash_attention_forward(
        *parts, None, query.shape[2], position_ids=position_ids, softmax_scale=scaling
    )
    return out, None


def padding_functions():
    """What takes padding out and puts it back: `index_first_axis`, `pad_input`, `rearrange`, `unpad_input`."""
    found = npu_flash_attn_utils
    return found.index_first_axis, found.pad_input, found.rearrange, found.unpad_input


def install() -> None:
    """Replaces both in verl, and names the attention to transformers. Calling it again changes nothing."""
    monkey_patch._flash_attention_forward = packed_attention
    attention_utils._get_attention_functions = padding_functions
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


install()
