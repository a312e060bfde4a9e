# SPDX-License-Identifier: Apache-2.0
"""The separate analysis batch: verl's own training loop, run on one batch and stopped at the advantages.

A copy of the trainer whose loader holds a single batch walks through ``fit``: rollout, filter, reward, log-probs,
values, advantages, whatever else the loop does there, now or in a later version. Where the loop would go on to learn
from the batch, the copy hands it over instead. Nothing of the loop is written a second time.
"""

import copy
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict


class _Prepared(Exception):
    """Carries the batch out of the loop."""

    def __init__(self, batch: Any):
        super().__init__("the analysis batch is ready")
        self.batch = batch


class _Stop:
    """Stands where the copy's hook stands: does what the original does, up to the analysis, and ends the loop there."""

    def __init__(self, hook: Any):
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    def analyze(self, trainer: Any, batch: Any, metrics: dict, timing_raw: dict) -> bool:
        raise _Prepared(batch)


def prepare_batch(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
    """Roll out and score a batch that no update will see.

    The prompts are drawn with a random generator of their own, so the order of the training data stays what it is;
    the rollout itself draws from the sampler like any other.

    Args:
        trainer: verl's ``RayPPOTrainer``, inside a step.
        num_groups: prompts.
        group_size: rollouts per prompt.
        seed: of the draw; one per step.

    Returns:
        The batch with advantages, filtered as training batches are.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(trainer.train_dataset), generator=generator)[:num_groups].tolist()
    batch = trainer.train_dataloader.collate_fn([trainer.train_dataset[index] for index in chosen])
    twin = _twin(trainer, batch, group_size)
    try:
        twin.fit()
    except _Prepared as prepared:
        return prepared.batch
    raise RuntimeError("verl's training loop ended without offering its batch to the gradient analysis")


def _twin(trainer: Any, batch: Any, group_size: int) -> Any:
    """The trainer with one batch to go; it shares the workers and owns whatever the loop changes on its way."""
    twin = copy.copy(trainer)
    twin.config = copy.deepcopy(trainer.config)
    with open_dict(twin.config):
        OmegaConf.update(twin.config, "actor_rollout_ref.rollout.n", group_size)
        OmegaConf.update(twin.config, "actor_rollout_ref.rollout.skip_rollout", False)
        OmegaConf.update(twin.config, "trainer.logger", [])
        OmegaConf.update(twin.config, "trainer.critic_warmup", 0)
        OmegaConf.update(twin.config, "trainer.val_before_train", False)
        OmegaConf.update(twin.config, "trainer.total_epochs", trainer.global_steps + 1)
        OmegaConf.update(twin.config, "global_profiler.steps", None)
    twin.train_dataloader = [batch]
    twin.val_reward_fn = None
    twin.gradloc = _Stop(trainer.gradloc)
    if hasattr(trainer, "kl_ctrl_in_reward"):
        twin.kl_ctrl_in_reward = copy.deepcopy(trainer.kl_ctrl_in_reward)
    # fit() counts from what the checkpoint says to the step that comes after it
    twin._load_checkpoint = lambda: setattr(twin, "global_steps", trainer.global_steps - 1)
    twin._update_critic = lambda prepared: twin.gradloc.analyze(twin, prepared, {}, {})
    return twin
