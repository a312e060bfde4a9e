# SPDX-License-Identifier: Apache-2.0
"""Rollouts with one long response in which tokens are stale, and the weights of every step on disk.

Loaded in the workers by `model.external_lib` and in the driver by `agent_loop_manager_class`.
"""

import functools
import json
import os
from pathlib import Path

import ray
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from experiments.cpu import rollout
from experiments.explosion import stale
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.rollout import base

base._ROLLOUT_REGISTRY[("hf_cpu_saving", "async")] = f"{__name__}.SavingRollout"
WEIGHTS = "weights"
"""The folder, within a run's, that holds the weights before each rollout: 0001.safetensors, ..."""
KNOBS = "knobs.json"
"""The file, within a run's folder, with the post-mortem's settings as verl has them."""


class SavingRollout(rollout.HFRollout):
    """The demo's rollout; it keeps every version of the weights, and it can be made to run on."""

    num_updates = 0

    async def update_weights(self, weights, **_):
        """Takes the trainer's full weights and, on rank 0, writes them to the run's folder.

        The first are those that training starts with; the last, by verl's final validation, those
        it ends with.
        """
        await super().update_weights(weights)
        self.num_updates += 1
        if torch.distributed.get_rank() == 0:
            folder = Path(os.environ["GRADLOC_RUN_DIR"]) / WEIGHTS
            folder.mkdir(exist_ok=True)
            state = {name: value.contiguous() for name, value in self.model.state_dict().items()}
            save_file(state, folder / f"{self.num_updates:04d}.safetensors")

    def generate(self, prompt_ids, sampling_params, request_id):
        """As `HFRollout.generate`. With `min_new_tokens`, the end token is not sampled before, and
        the log-probs are the policy's own, in which it could have been.
        """
        answers = super().generate(prompt_ids, sampling_params, request_id)
        if "min_new_tokens" not in sampling_params:
            return answers
        pairs = zip(prompt_ids, answers, strict=True)
        return [
            (tokens, self.log_probs(prompt, tokens, sampling_params["temperature"])) for prompt, (tokens, _) in pairs
        ]

    @torch.no_grad()
    def log_probs(self, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        """What the policy gives each token of an answer."""
        ids = torch.tensor([prompt + tokens])
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        chosen = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
        return chosen.squeeze(-1).tolist()


class ExplosionManager(rollout.DirectManager):
    """The demo's manager; at two steps one response is long and its tokens are marked."""

    def __init__(self, config, worker_group, rm_resource_pool=None):
        super().__init__(config, worker_group, rm_resource_pool)
        self.settings = stale.Settings(**OmegaConf.to_container(config.explosion, resolve=True))
        actor = config.actor_rollout_ref.actor
        knobs = {
            "max_grad_norm": actor.grad_clip,
            "learning_rate": actor.optim.lr,
            "temperature": self.rollout.temperature,
            "runaway_penalty": config.reward_model.reward_kwargs.runaway_penalty,
        }
        path = Path(os.environ["GRADLOC_RUN_DIR"]) / KNOBS
        path.write_text(json.dumps(knobs) + "\n", encoding="utf-8")

    def generate_sequences(self, prompts):
        """Returns the rollouts and, for training, their marks."""
        output = super().generate_sequences(prompts)
        if prompts.meta_info.get("validate"):
            return output
        step, shape = output.meta_info["demo_step"], output.batch["responses"].shape
        output.batch[stale.KEY] = torch.zeros(shape, dtype=torch.int8)
        probability = self.settings.probabilities.get(step)
        if probability is not None:
            row = stale.draw_row(self.seed, step, shape[0])
            mask = output.batch["response_mask"][row].bool()
            log_probs = output.batch["rollout_log_probs"]
            positions = stale.choose(self.settings, log_probs[row][mask].tolist())
            planted = stale.marks(*shape, row, int(mask.sum()), positions)
            output.batch[stale.KEY] = planted
            output.batch["rollout_log_probs"] = stale.as_sampled(log_probs, planted, probability)
        return output

    def response_width(self, answers):
        """No wider than it has to be: with 200 columns for 17 tokens most of them are padding.

        One column more than the longest has tells verl that it did not reach the limit.
        """
        longest = max(len(tokens) for tokens, _ in answers)
        return min(longest + 1, self.rollout.response_length)

    def answer(self, prompt_ids, params, step):
        """As `DirectManager.answer`, with one response as long as may be."""
        answers = super().answer(prompt_ids, params, step)
        if step in self.settings.probabilities and params["do_sample"]:
            row = stale.draw_row(self.seed, step, len(prompt_ids))
            length = params["max_new_tokens"]
            seed = rollout.call_seed(self.seed, step, len(self.workers))
            call = rollout.ask(self.workers[0], [prompt_ids[row]], {**params, "min_new_tokens": length}, seed)
            (answers[row],) = ray.get(call)
        return answers


def store_stale_log_probs(compute_log_prob):
    """Wraps the actor's method: a stale token's old log-prob is the one it was sampled with.

    Real runs come by such a value through an engine that computes other probabilities than the
    trainer does, or through a policy that has moved on since the rollout.
    """

    @functools.wraps(compute_log_prob)
    def wrapped(self, data, calculate_entropy=False):
        log_probs, entropy = compute_log_prob(self, data, calculate_entropy=calculate_entropy)
        if stale.KEY in data.batch.keys():
            is_stale = data.batch[stale.KEY] == stale.STALE
            sampled = data.batch["rollout_log_probs"].to(log_probs.device)
            log_probs = torch.where(is_stale.to(log_probs.device), sampled, log_probs)
        return log_probs, entropy

    wrapped._gradloc_demo = True
    return wrapped


if not getattr(DataParallelPPOActor.compute_log_prob, "_gradloc_demo", False):
    DataParallelPPOActor.compute_log_prob = store_stale_log_probs(DataParallelPPOActor.compute_log_prob)
