# SPDX-License-Identifier: Apache-2.0
"""On verl 0.7: rollouts with one long response in which tokens are stale, every step's weights on disk, the reward.

Loaded in the workers by `model.external_lib`, in the driver by `agent_loop_manager_class` and as its reward manager.
"""

import ray
import torch
from omegaconf import OmegaConf

from lab.experiments.cpu import rollout
from lab.experiments.cpu.reward import ArithmeticReward, rows_of
from lab.experiments.explosion import plant
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.rollout import base

base._ROLLOUT_REGISTRY[("hf_cpu_saving", "async")] = f"{__name__}.SavingRollout"


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
            plant.save(self.model, self.num_updates)

    def generate(self, prompt_ids, sampling_params, request_id):
        """As `HFRollout.generate`; with `is_long`, each answer is as long as may be."""
        if not sampling_params.get("is_long"):
            return super().generate(prompt_ids, sampling_params, request_id)
        params = {name: value for name, value in sampling_params.items() if name != "is_long"}
        return [plant.answer_at_length(self.model, prompt, params, int(request_id)) for prompt in prompt_ids]


class ExplosionManager(rollout.DirectManager):
    """The demo's manager; at two steps one response is long and its tokens are marked."""

    def __init__(self, config, worker_group, rm_resource_pool=None):
        super().__init__(config, worker_group, rm_resource_pool)
        self.settings = plant.Settings(**OmegaConf.to_container(config.explosion, resolve=True))
        plant.write_knobs(OmegaConf.to_container(config.knobs, resolve=True))

    def generate_sequences(self, prompts):
        """Returns the rollouts and, for training, their marks."""
        output = super().generate_sequences(prompts)
        if prompts.meta_info.get("validate"):
            return output
        step, shape = output.meta_info["demo_step"], output.batch["responses"].shape
        output.batch[plant.KEY] = torch.zeros(shape, dtype=torch.int8)
        probability = self.settings.probabilities.get(step)
        if probability is not None:
            row = plant.draw_row(self.seed, step, shape[0])
            mask, log_probs = output.batch["response_mask"], output.batch["rollout_log_probs"]
            planted = plant.plant(self.settings, row, mask, log_probs)
            output.batch[plant.KEY] = planted
            output.batch["rollout_log_probs"] = plant.as_sampled(log_probs, planted, probability)
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
            row = plant.draw_row(self.seed, step, len(prompt_ids))
            seed = rollout.call_seed(self.seed, step, len(self.workers))
            call = rollout.ask(self.workers[0], [prompt_ids[row]], {**params, "is_long": True}, seed)
            (answers[row],) = ray.get(call)
        return answers


class ExplosionReward(ArithmeticReward):
    """The demo's reward manager; it passes the marks on and writes down what is planted.

    Args:
        advantage: what the planted response's tokens get.
        kwargs: as `ArithmeticReward`.
    """

    def __init__(self, *args, advantage: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.advantage = float(advantage)

    def __call__(self, data, return_dict=False):
        """Scores the rows; those of a validation have no marks."""
        if not data.meta_info.get("validate"):
            plant.observe(rows_of(data), data.batch[plant.KEY], self.advantage, self.tokenizer)
        return super().__call__(data, return_dict)


def store_stale_log_probs(compute_log_prob):
    """Wraps the actor's method: a stale token's old log-prob is the one it was sampled with.

    Real runs come by such a value through an engine that computes other probabilities than the
    trainer does, or through a policy that has moved on since the rollout.
    """

    def wrapped(self, data, calculate_entropy=False):
        log_probs, entropy = compute_log_prob(self, data, calculate_entropy=calculate_entropy)
        if plant.KEY in data.batch.keys():
            is_stale = data.batch[plant.KEY] == plant.STALE
            sampled = data.batch["rollout_log_probs"].to(log_probs.device)
            log_probs = torch.where(is_stale.to(log_probs.device), sampled, log_probs)
        return log_probs, entropy

    return wrapped


DataParallelPPOActor.compute_log_prob = store_stale_log_probs(DataParallelPPOActor.compute_log_prob)
