# SPDX-License-Identifier: Apache-2.0
"""The separate analysis batch: verl's ``fit``, stopped at the advantages."""

import copy
from typing import Any

from ..verl_common.analyses import drawn_prompts, hand_over, prepared_by, twin_of


def prepare_batch(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
    """Roll out and score a batch that no update will see; the rollout draws from the sampler like any other.

    Args:
        trainer: verl's ``RayPPOTrainer``, inside a step.
        num_groups: prompts.
        group_size: rollouts per prompt.
        seed: of the prompts' draw; one per step.

    Returns:
        The batch with advantages, filtered as training batches are.
    """
    prompts = drawn_prompts(trainer, num_groups, seed)
    changes = {
        "actor_rollout_ref.rollout.n": group_size,
        "actor_rollout_ref.rollout.skip_rollout": False,
        "trainer.logger": [],
        "trainer.critic_warmup": 0,
        "trainer.val_before_train": False,
        "trainer.total_epochs": trainer.global_steps + 1,
        "global_profiler.steps": None,
    }
    twin = twin_of(trainer, changes)
    twin.train_dataloader = [prompts]
    twin.val_reward_fn = None
    # fit() counts from what the checkpoint says to the step that comes after it
    twin._load_checkpoint = lambda: setattr(twin, "global_steps", trainer.global_steps - 1)
    twin.gradloc = copy.copy(trainer.gradloc)
    twin.gradloc.analyze = lambda trainer, batch, *_: hand_over(batch)
    twin._update_critic = hand_over
    return prepared_by(twin.fit)
