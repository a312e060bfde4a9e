# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism where flash attention is not installed: verl's own exchange around an attention on CPU."""

from contextlib import contextmanager
from unittest import mock


@contextmanager
def attention_of_verl():
    """The model's attention is verl's, which swaps sequence for heads before and after flash attention's function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from tests.world.models.packed_attention import attention, packed_attention
    from verl.models.transformers import monkey_patch

    patch = mock.patch.object(monkey_patch, "_flash_attention_forward", packed_attention)
    with patch, plain_padding(), mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}):
        yield


@contextmanager
def plain_padding():
    """verl's remove_padding where flash attention is not installed."""
    from tests.world.models.packed_attention import padding_functions
    from verl.utils import attention_utils

    with mock.patch.object(attention_utils, "_get_attention_functions", padding_functions):
        yield
