# SPDX-License-Identifier: Apache-2.0
"""A tiny language model of transformers, where the benchmarks have a pretrained one."""

import pytest
import torch


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Its folder; 96 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    return folder
