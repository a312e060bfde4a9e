# SPDX-License-Identifier: Apache-2.0
"""Plant `lab.experiments.explosion` in verl 0.9's trainer; loaded by `actor_rollout_ref.model.external_lib`.

The server generates the long response and flags it. Then the trainer marks its stale tokens and passes the marks to the
advantage estimator.
"""

import sys

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from lab.experiments.cpu.reward import is_runaway
from lab.experiments.explosion import plant
from lab.experiments.generation import call_seed
from lab.experiments.verl09 import rollout
from lab.experiments.verl09.rows import TRAINER, fetch, rows_of
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.utils.padding import response_to_nested

base._ROLLOUT_REGISTRY[("hf_cpu_saving", "async")] = "lab.experiments.verl09.rollout.WeightSender"
RolloutReplicaRegistry.register("hf_cpu_saving", lambda: SavingReplica)


class SavingServer(rollout.Server):
    """The demo's server; it writes every version of the weights, and makes one response long at some steps.

    Args:
        planted_steps: the steps, counted from 1.
    """

    def __init__(self, *args, planted_steps: list[int], **kwargs):
        super().__init__(*args, **kwargs)
        self.planted_steps = planted_steps

    async def load(self, weights: dict, global_steps: int | None) -> None:
        """Load the trainer's weights and write them to disk: the initial ones, and each step's."""
        await super().load(weights, global_steps)
        plant.save(self.model, self.step)

    def _sample(self, prompts, asked):
        answers = super()._sample(prompts, asked)
        if self.step in self.planted_steps:
            row = plant.draw_row(self.seed, self.step, len(prompts))
            # not the seed of an ordinary call
            seed = call_seed(self.seed, self.step, self.num_calls)
            made = plant.answer_at_length(self.model, prompts[row], self._params(asked), seed)
            answers[row].token_ids, answers[row].log_probs = made
            answers[row].extra_fields = {**answers[row].extra_fields, plant.KEY: True}
        return answers


class SavingReplica(rollout.Replica):
    """Start the server."""

    server = SavingServer


def put(batch, name: str, values: torch.Tensor, response_mask: torch.Tensor) -> None:
    """Replace a field of a batch by (B, T) values, cut to the lengths of the nested mask."""
    fields = TensorDict({name: response_to_nested(values, response_mask)}, batch_size=len(values))
    transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def punish_runaways(trainer, batch) -> None:
    """Multiply the reward of a response without an end, as the reward manager on verl 0.7 does."""
    found = fetch(batch, "responses", "response_mask", "rm_scores")
    width = trainer.config.data.max_response_length
    size = (len(batch.keys), width)
    responses, mask = (found[name].to_padded_tensor(0, output_size=size) for name in ("responses", "response_mask"))
    runaways = is_runaway(responses, mask, trainer.tokenizer.eos_token_id)
    rewards = found["rm_scores"].to_padded_tensor(0.0)
    rewards[runaways] *= trainer.config.knobs.runaway_penalty
    put(batch, "rm_scores", rewards, found["response_mask"])


def mark(settings: plant.Settings, batch, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the marks (B, T) of a batch, given its rollout log-probs; all 0 without a plant."""
    found = fetch(batch, "extra_fields", "response_mask")
    planted = [row for row, fields in enumerate(found["extra_fields"]) if fields.get(plant.KEY)]
    if not planted:
        return torch.zeros(log_probs.shape, dtype=torch.int8)
    (row,) = planted
    return plant.plant(settings, row, found["response_mask"].to_padded_tensor(0), log_probs)


def install(trainer) -> None:
    """Wrap the trainer's `_compute_old_log_prob`."""
    original = trainer._compute_old_log_prob

    def compute_old_log_prob(self, batch, metrics):
        settings = plant.Settings(**OmegaConf.to_container(self.config.explosion, resolve=True))
        if self.global_steps == 1:
            plant.write_knobs(OmegaConf.to_container(self.config.knobs, resolve=True))
        punish_runaways(self, batch)
        rows = rows_of(batch, self.global_steps)
        marks = mark(settings, batch, rows.log_probs)
        plant.observe(rows, marks, settings.advantage, self.tokenizer)
        if not marks.any():
            return original(self, batch, metrics)
        probability = settings.probabilities[self.global_steps]
        response_mask = fetch(batch, "response_mask")["response_mask"]
        put(batch, "rollout_log_probs", plant.as_sampled(rows.log_probs, marks, probability), response_mask)
        done = original(self, batch, metrics)
        old = fetch(batch, "old_log_probs")["old_log_probs"].to_padded_tensor(0.0)
        put(batch, "old_log_probs", plant.as_sampled(old, marks, probability), response_mask)
        return done

    trainer._compute_old_log_prob = compute_old_log_prob


if TRAINER in sys.modules:  # only in the trainer's process
    install(sys.modules[TRAINER].PPOTrainer)
