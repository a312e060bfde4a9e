# SPDX-License-Identifier: Apache-2.0
"""A tiny vision-language model, batches with pictures in their prompts, and scenarios with both; runs inside a rank."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.world import trainer_folder
from tests.world.harness import VOCABULARY, make_batch, make_trainer, model_config
from tests.world.oracle import Oracle
from tests.world.settings import require
from tests.world.spikes import plant

PATCH, FRAMES, MERGE = 4, 2, 2
"""Pixels of a patch's side, frames to a patch, patches of the side of what becomes one token."""
START, PAD, END = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2
GRID = (1, MERGE, MERGE)
"""Frames, rows and columns of patches: one token of the prompt."""
PLACE = (6, 2)
"""Row and position of what is planted."""
SIZE = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]


def make_vision_model() -> torch.nn.Module:
    """A random Qwen2.5-VL in float32, its forward replaced by verl's as a worker does."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from verl.models.transformers.monkey_patch import apply_monkey_patch

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**vision_config()))
    apply_monkey_patch(model, use_remove_padding=False)
    return model


def vision_config() -> dict[str, Any]:
    """Return the arguments of transformers' config of the tiny model."""
    text = model_config()
    shared = {name: getattr(text, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {name: getattr(text, name) for name in ("num_attention_heads", "num_key_value_heads")}
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return {
        "text_config": {
            **shared,
            **heads,
            "vocab_size": VOCABULARY + 8,
            "max_position_embeddings": 64,
            "rope_scaling": rope,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": PATCH,
            "temporal_patch_size": FRAMES,
            "spatial_merge_size": MERGE,
            "window_size": 2 * PATCH * MERGE,
            "fullatt_block_indexes": [1],
            "out_hidden_size": text.hidden_size,
        },
        "image_token_id": PAD,
        "video_token_id": VOCABULARY + 3,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }


def make_vision_batch(texts: tuple[int, ...] = ()) -> Any:
    """Eight rows of `make_batch` with a picture at the start of each prompt, another for each prompt.

    ``texts``: rows without one.
    """
    batch = make_batch(num_rows=8)
    generator = torch.Generator().manual_seed(1000)
    shape = (GRID[1] * GRID[2], 3 * FRAMES * PATCH * PATCH)
    pictures = torch.randn(len(batch) // 2, *shape, generator=generator)
    inputs = np.empty(len(batch), dtype=object)
    for row in range(len(batch)):
        inputs[row] = {}
        if row not in texts:
            batch.batch["input_ids"][row, :3] = torch.tensor([START, PAD, END])
            inputs[row] = {"pixel_values": pictures[row // 2], "image_grid_thw": torch.tensor([GRID])}
    batch.non_tensor_batch["multi_modal_inputs"] = inputs
    # a text position and three of the picture's, which is one token here: the same in all four
    batch.batch["position_ids"] = batch.batch["position_ids"].unsqueeze(1).repeat(1, 4, 1)
    return batch


def train(overrides: list[str], dump_dir: str, advantage: float, has_oracle: bool = False) -> dict[str, Any]:
    """One update with a token's advantage; what it leaves behind, and the oracle's account of it.

    On verl 0.7 the first micro-batch of rank 0 has no picture; verl 0.9.1 itself fails there with transformers 5.
    """
    require(find_spec("verl") is not None, "verl's own forward takes the pictures")
    batch = make_vision_batch(texts=(0, 1) if trainer_folder() == "verl07" else ())
    plant(batch, *PLACE, advantage)
    plain = make_vision_model()
    trainer = make_trainer(SIZE + overrides, dump_dir, model=make_vision_model())
    oracle = Oracle(trainer, plain, batch) if has_oracle and dist.get_rank() == 0 else None
    events = trainer.update(batch)["events"]
    found = {"weights": trainer.weights_hash(), "rng": torch.get_rng_state().numpy().tobytes()}
    if oracle is None:
        return found
    named = [culprit for event in events for culprit in event["culprits"]]
    account = oracle.account(named)
    return {**found, **{name: account[name] for name in ("norm", "norm_without", "shares")}}


def pictures_of(batch: Any, rows: slice) -> dict[str, Any]:
    """Return what a plain model is given of these rows' pictures, as verl's own forward makes it of them."""
    from verl.utils.model import extract_multi_modal_inputs

    inputs = extract_multi_modal_inputs(batch.non_tensor_batch["multi_modal_inputs"][rows])
    positions = batch.batch["position_ids"][rows]
    return {**inputs, "position_ids": positions.transpose(0, 1) if positions.dim() == 3 else positions}


def save_model(folder: str) -> None:
    """The tiny model as a folder."""
    make_vision_model().save_pretrained(folder)
