# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Qwen2.5-VL with the demo's tokenizer: `python -m lab.experiments.vision.build FOLDER`."""

import sys

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from lab.experiments.cpu.build import make_tokenizer

PATCH, FRAMES, MERGE = 4, 2, 2


def make_model(folder: str) -> None:
    """Save a random model of about 40 thousand parameters with the demo's tokenizer."""
    tokenizer = make_tokenizer()
    size, pad, eos = len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": size + 8, "max_position_embeddings": 128}
    text |= {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}
    text |= {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": eos}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": PATCH, "temporal_patch_size": FRAMES, "spatial_merge_size": MERGE}
    vision |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=size,
        image_token_id=size + 1,
        vision_end_token_id=size + 2,
        video_token_id=size + 3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_model(sys.argv[1])
