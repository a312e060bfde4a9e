# SPDX-License-Identifier: Apache-2.0
"""Let verl pack sequences, and split one over several ranks, without flash attention.

Load it with `VERL_USE_EXTERNAL_MODULES=lab.experiments.layouts.sequences` and set
`actor_rollout_ref.model.override_config.attn_implementation=packed_cpu`. verl's Ulysses exchange runs around an
attention in plain torch; padding is removed by verl's functions for Ascend. Importing this module installs both.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from lab.experiments.layouts.attention import attention, packed_attention, padding_functions
from verl.models.transformers import monkey_patch
from verl.utils import attention_utils

monkey_patch._flash_attention_forward = packed_attention
attention_utils._get_attention_functions = padding_functions
AttentionInterface.register("packed_cpu", attention)
AttentionMaskInterface.register("packed_cpu", lambda *_, **__: None)
