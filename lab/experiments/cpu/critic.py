# SPDX-License-Identifier: Apache-2.0
"""Lets verl build a critic where flash-attention is not installed, as on a machine with no GPU.

verl's critic asks for `flash_attention_2` by name, whatever `override_config` says (verl 0.7.0,
`load_valuehead_model`). `critic.model.external_lib: lab.experiments.cpu.critic` loads this module in
each worker before that, and the critic's model is then built with torch's own attention.
"""

import torch
from transformers import AutoModelForTokenClassification

_from_pretrained = AutoModelForTokenClassification.from_pretrained


def from_pretrained(*args, **kwargs):
    """transformers' own, with torch's attention."""
    return _from_pretrained(*args, **{**kwargs, "attn_implementation": "sdpa"})


if not torch.cuda.is_available():
    AutoModelForTokenClassification.from_pretrained = from_pretrained
