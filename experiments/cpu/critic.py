# SPDX-License-Identifier: Apache-2.0
"""Lets verl build a critic where flash-attention is not installed, as on a machine with no GPU.

verl's critic asks for `flash_attention_2` by name, whatever `override_config` says (verl 0.7.0,
`load_valuehead_model`). `critic.model.external_lib: experiments.cpu.critic` loads this module in
each worker before that, and the critic's model is then built with torch's own attention.
"""

import functools

import torch
from transformers import AutoModelForTokenClassification


def install() -> None:
    """Replaces the request once; does nothing where there is a GPU."""
    original = AutoModelForTokenClassification.from_pretrained
    if torch.cuda.is_available() or getattr(original, "_gradloc_demo", False):
        return

    @functools.wraps(original)
    def from_pretrained(*args, **kwargs):
        return original(*args, **{**kwargs, "attn_implementation": "sdpa"})

    from_pretrained._gradloc_demo = True
    AutoModelForTokenClassification.from_pretrained = from_pretrained


install()
