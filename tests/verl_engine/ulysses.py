# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism where flash attention is not installed: verl's own exchange around an attention on CPU."""

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from .harness import train

SIZE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def train_in_parallel(overrides: list[str], **settings: Any) -> dict[str, Any]:
    """`harness.train` with two ranks to a sequence."""
    with attention_of_verl():
        return train([*overrides, f"{SIZE}=2"], **settings)


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
    with patch, mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}):
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
