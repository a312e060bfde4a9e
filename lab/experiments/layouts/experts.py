# SPDX-License-Identifier: Apache-2.0
"""Build a mixture of experts for the demo: four experts per layer, two per token.

python -m lab.experiments.layouts.experts --cache .gradloc
"""

import sys
from pathlib import Path

from lab.experiments.cpu import build, material
from lab.experiments.cpu.material import Recipe


def make_model(tokenizer):
    """Return a random Qwen3-MoE of about 120 thousand parameters, in float32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    plain = material.make_model(Recipe(), tokenizer)
    given = {name: value for name, value in plain.config.to_diff_dict().items() if name != "model_type"}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**given, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = plain.generation_config
    return model


def make(cache: Path, report) -> Path:
    """Return the model's folder, which is made each time."""
    folder = cache.resolve() / "demo-experts"
    tokenizer = build.make_tokenizer()
    model = make_model(tokenizer)
    material.warm_up(model, tokenizer, build.LANGUAGE, Recipe(), report)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(material.main("the demo with experts", make))
