# SPDX-License-Identifier: Apache-2.0
"""Sequences end to end, and parts of one on several ranks, where flash attention is not installed.

Load it with `VERL_USE_EXTERNAL_MODULES=lab.experiments.layouts.sequences` and ask for
`actor_rollout_ref.model.override_config.attn_implementation=packed_cpu`. verl's own exchange of sequence for heads
(Ulysses) runs around an attention in plain torch; padding is taken out by what verl has for Ascend, in plain torch.
verl can only import such a module, so importing this one replaces both.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from lab.experiments.layouts.attention import attention, packed_attention, padding_functions
from verl.models.transformers import monkey_patch
from verl.utils import attention_utils

monkey_patch._flash_attention_forward = packed_attention
attention_utils._get_attention_functions = padding_functions
AttentionInterface.register("packed_cpu", attention)
AttentionMaskInterface.register("packed_cpu", lambda *_, **__: None)
