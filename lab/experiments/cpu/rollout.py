# SPDX-License-Identifier: Apache-2.0
"""Generate rollouts from the current weights with transformers' `generate`, inside the FSDP workers.

Two classes, both chosen by the config:

- `HFRollout` runs in each worker (`model.external_lib` registers it as rollout "hf_cpu"). verl's `rollout_mode()` gives
  it the gathered weights before every generation.
- `DirectManager` runs in the driver (`rollout.agent.agent_loop_manager_class`): it wakes the workers, gives each its
  share of the prompts in one call, and pads the answers into verl's layout.

One call per worker, seeded by (seed, step, first row), makes runs bitwise reproducible. verl's agent loop orders
requests by arrival and is not reproducible.
"""

import time

import numpy as np
import pandas
import ray
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from lab.experiments.generation import call_seed, left_pad, sample
from verl import DataProto
from verl.utils import hf_tokenizer
from verl.utils.model import compute_position_id_with_mask
from verl.utils.torch_functional import pad_2d_list_to_length
from verl.workers.rollout import base

base._ROLLOUT_REGISTRY[("hf_cpu", "async")] = f"{__name__}.HFRollout"


class HFRollout(base.BaseRollout):
    """A plain copy of the policy that generates for one worker."""

    def __init__(self, config, model_config, device_mesh):
        super().__init__(config, model_config, device_mesh)
        hf_config = AutoConfig.from_pretrained(self.model_config.local_path)
        self.model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa").eval()

    async def resume(self, tags):
        """Do nothing: on a CPU no memory is released."""

    async def release(self):
        """Do nothing: on a CPU no memory is released."""

    async def update_weights(self, weights, **_):
        """Load the trainer's full weights; every name must match."""
        self.model.load_state_dict(dict(weights), strict=True)

    def generate(self, prompt_ids, sampling_params, request_id):
        """Answer a batch of prompts.

        Args:
            prompt_ids: one list of token ids per prompt.
            sampling_params: `temperature`, `top_p`, `do_sample`, `max_new_tokens`, `pad_token_id`.
            request_id: the seed of this call's random numbers.

        Returns:
            One `(token_ids, log_probs)` per prompt, both up to and including the end token.
        """
        return sample(self.model, prompt_ids, sampling_params, int(request_id))


class DirectManager:
    """verl's `AgentLoopManager` reduced to one batched call per worker."""

    rollout_replicas = ()
    """Empty: the training workers generate."""

    def __init__(self, config, worker_group, rm_resource_pool=None):
        self.workers = worker_group.workers
        self.rollout = config.actor_rollout_ref.rollout
        self.seed = config.get("seed", 0)
        self.tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return the prompts with their responses in verl's padded layout."""
        start = time.perf_counter()
        ray.get([worker.wake_up.remote() for worker in self.workers])
        prompt_ids = [
            self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
            for messages in prompts.non_tensor_batch["raw_prompt"]
        ]
        params = self.sampling_params(prompts.meta_info)
        step = prompts.meta_info.get("global_steps", 0)
        answers = self.answer(prompt_ids, params, step)
        ray.get([worker.sleep.remote() for worker in self.workers])
        output = to_batch(
            prompt_ids, answers, self.tokenizer.pad_token_id, self.rollout.prompt_length, self.response_width(answers)
        )
        uids = prompts.non_tensor_batch["uid"]
        # occurrences so far: ["a", "b", "a"] gives [0, 0, 1]
        output.non_tensor_batch["rollout_index"] = pandas.Series(uids).groupby(uids).cumcount().to_numpy(dtype=object)
        output.non_tensor_batch["__num_turns__"] = np.full(len(uids), 2, dtype=np.int32)
        # the reward manager has no other source for the step
        output.meta_info["demo_step"] = step
        output.meta_info["timing"] = {"generate_sequences": time.perf_counter() - start}
        return output

    def answer(self, prompt_ids: list[list[int]], params: dict, step: int) -> list:
        """Return one `(token_ids, log_probs)` per prompt; each worker answers an equal share of them."""
        rows = np.array_split(np.arange(len(prompt_ids)), len(self.workers))
        answers = ray.get(
            [
                ask(worker, [prompt_ids[i] for i in part], params, call_seed(self.seed, step, rank))
                for rank, (worker, part) in enumerate(zip(self.workers, rows, strict=True))
                if len(part)
            ]
        )
        return [answer for part in answers for answer in part]

    def response_width(self, answers: list) -> int:
        """Return the width of the padded responses."""
        return self.rollout.response_length

    def sampling_params(self, meta_info: dict) -> dict:
        """Return the parameters of `HFRollout.generate`, from the training or the validation settings."""
        source = self.rollout.val_kwargs if meta_info.get("validate") else self.rollout
        return {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "do_sample": bool(source.do_sample),
            "max_new_tokens": self.rollout.response_length,
            "pad_token_id": self.tokenizer.pad_token_id,
        }


def ask(worker, *arguments):
    """Call a worker's `HFRollout.generate` remotely."""
    return worker.__ray_call__.remote(_generate, *arguments)


def _generate(worker, *arguments) -> list:
    (rollout,) = (part.rollout for part in worker.worker_dict.values() if hasattr(part, "rollout"))
    return rollout.generate(*arguments)


def to_batch(prompt_ids, answers, pad: int, prompt_length: int, response_length: int) -> DataProto:
    """Pad prompts on the left to `prompt_length` and responses on the right to `response_length`."""
    prompts = left_pad(prompt_ids, pad, prompt_length)
    tokens, log_probs = zip(*answers, strict=True)
    responses = pad_2d_list_to_length(tokens, pad, response_length)
    response_mask = pad_2d_list_to_length([[1] * len(row) for row in tokens], 0, response_length)
    attention_mask = torch.cat([prompts["attention_mask"], response_mask], dim=1)
    batch = TensorDict(
        {
            "prompts": prompts["input_ids"],
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompts["input_ids"], responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
            "rollout_log_probs": pad_2d_list_to_length(log_probs, 0.0, response_length),
        },
        batch_size=len(prompt_ids),
    )
    return DataProto(batch=batch, non_tensor_batch={}, meta_info={})
