# SPDX-License-Identifier: Apache-2.0
"""Plant the explosion on verl 0.7: a long response with stale tokens; every step's weights are written to disk.

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
    """The demo's rollout; it writes every version of the weights, and can generate a long response."""

    num_updates = 0

    async def update_weights(self, weights, **_):
        """Load the trainer's full weights and, on rank 0, write them to the run's folder.

        The first version is the initial one; the last, at verl's final validation, the final one.
        """
        await super().update_weights(weights)
        self.num_updates += 1
        if torch.distributed.get_rank() == 0:
            plant.save(self.model, self.num_updates)

    def generate(self, prompt_ids, sampling_params, request_id):
        """Generate as `HFRollout`; with `is_long`, each answer has the maximum length."""
        if not sampling_params.get("is_long"):
            return super().generate(prompt_ids, sampling_params, request_id)
        params = {name: value for name, value in sampling_params.items() if name != "is_long"}
        return [plant.answer_at_length(self.model, prompt, params, int(request_id)) for prompt in prompt_ids]


class ExplosionManager(rollout.DirectManager):
    """The demo's manager; at two steps it plants a long response and marks its tokens."""

    def __init__(self, config, worker_group, rm_resource_pool=None):
        super().__init__(config, worker_group, rm_resource_pool)
        self.settings = plant.Settings(**OmegaConf.to_container(config.explosion, resolve=True))
        plant.write_knobs(OmegaConf.to_container(config.knobs, resolve=True))

    def generate_sequences(self, prompts):
        """Return the rollouts and, for training, their marks."""
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
        """Return one column more than the longest answer has, so that verl sees that it did not reach the limit."""
        longest = max(len(tokens) for tokens, _ in answers)
        return min(longest + 1, self.rollout.response_length)

    def answer(self, prompt_ids, params, step):
        """Answer as `DirectManager`, with one response of the maximum length at the planted steps."""
        answers = super().answer(prompt_ids, params, step)
        if step in self.settings.probabilities and params["do_sample"]:
            row = plant.draw_row(self.seed, step, len(prompt_ids))
            seed = rollout.call_seed(self.seed, step, len(self.workers))
            call = rollout.ask(self.workers[0], [prompt_ids[row]], {**params, "is_long": True}, seed)
            (answers[row],) = ray.get(call)
        return answers


class ExplosionReward(ArithmeticReward):
    """The demo's reward manager; it also passes the marks to the estimator.

    Args:
        advantage: advantage of the planted response's tokens.
        kwargs: of `ArithmeticReward`.
    """

    def __init__(self, *args, advantage: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.advantage = float(advantage)

    def __call__(self, data, return_dict=False):
        """Score the rows; those of a validation have no marks."""
        if not data.meta_info.get("validate"):
            plant.observe(rows_of(data), data.batch[plant.KEY], self.advantage, self.tokenizer)
        return super().__call__(data, return_dict)


def store_stale_log_probs(compute_log_prob):
    """Wrap the actor's method so that a stale token's old log-prob is the one it was sampled with.

    In real runs the cause is an engine with different probabilities, or a policy that has changed since the rollout.
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
