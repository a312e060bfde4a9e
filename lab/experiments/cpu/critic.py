# SPDX-License-Identifier: Apache-2.0
"""Let verl build a critic without flash-attention, as on a machine without a GPU.

verl's critic requests `flash_attention_2` regardless of `override_config` (verl 0.7.0, `load_valuehead_model`). Loaded
in each worker by `critic.model.external_lib: lab.experiments.cpu.critic`, this module builds it with torch's attention.
"""

import torch
from transformers import AutoModelForTokenClassification

_from_pretrained = AutoModelForTokenClassification.from_pretrained


def from_pretrained(*args, **kwargs):
    """Call the original with torch's attention."""
    return _from_pretrained(*args, **{**kwargs, "attn_implementation": "sdpa"})


if not torch.cuda.is_available():
    AutoModelForTokenClassification.from_pretrained = from_pretrained
