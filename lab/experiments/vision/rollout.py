# SPDX-License-Identifier: Apache-2.0
"""Add an image to the demo's prompts for a tiny Qwen2.5-VL, and draw random responses, to show the update.

verl's actor, workers and trainer are the real ones; docs/experiments.md has the command.
"""

import zlib
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from lab.experiments.cpu.rollout import DirectManager, HFRollout
from lab.experiments.vision.build import FRAMES, MERGE, PATCH
from verl.workers.rollout import base

base._ROLLOUT_REGISTRY[("hf_cpu", "async")] = f"{__name__}.RandomRollout"


class RandomRollout(HFRollout):
    """Draw random responses of half the maximum length, with the demo's seeds."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any):
        base.BaseRollout.__init__(self, config, model_config, device_mesh)
        self._size = AutoConfig.from_pretrained(model_config.local_path).vision_start_token_id

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Consume the weights, which all workers gather, without using them."""
        for _name, _weight in weights:
            pass

    def generate(self, prompt_ids: list, sampling_params: dict, request_id: str) -> list:
        """Return one `(token_ids, log_probs)` per prompt."""
        generator = torch.Generator().manual_seed(int(request_id) % 2**31)
        length = sampling_params["max_new_tokens"] // 2
        log_probs = [-float(np.log(self._size))] * length
        return [(torch.randint(5, self._size, (length,), generator=generator).tolist(), log_probs) for _ in prompt_ids]


class PictureManager(DirectManager):
    """The demo's manager, with an image at the start of each prompt: four patches, one token."""

    def __init__(self, config: Any, worker_group: Any, rm_resource_pool: Any = None):
        super().__init__(config, worker_group, rm_resource_pool)
        model = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
        placeholder = [model.vision_start_token_id, model.image_token_id, model.vision_end_token_id]
        plain = self.tokenizer.apply_chat_template
        self.tokenizer.apply_chat_template = lambda *given, **named: [*placeholder, *plain(*given, **named)]

    def generate_sequences(self, prompts: Any) -> Any:
        """Generate as the demo, with the fields that verl's agent loop adds for images."""
        output = super().generate_sequences(prompts)
        inputs = np.empty(len(output), dtype=object)
        for row, uid in enumerate(prompts.non_tensor_batch["uid"]):
            generator = torch.Generator().manual_seed(zlib.crc32(str(uid).encode()))
            shape = (MERGE * MERGE, 3 * FRAMES * PATCH * PATCH)
            pixels = torch.randn(shape, generator=generator)
            inputs[row] = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, MERGE, MERGE]])}
        output.non_tensor_batch["multi_modal_inputs"] = inputs
        output.batch["position_ids"] = output.batch["position_ids"].unsqueeze(1).repeat(1, 4, 1)
        return output
