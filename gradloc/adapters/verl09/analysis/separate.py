# SPDX-License-Identifier: Apache-2.0
"""The separate analysis batch: a step of verl's V1 trainer, stopped at the advantages."""

from typing import Any

import torch

from ...verl_common.analyses import drawn_prompts, hand_over, prepared_by, twin_of


def prepare_batch(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
    """Roll out and score a batch that no update will see; the rollout draws from the sampler like any other.

    Its rows lie in verl's queue until they are cleared from it.

    Args:
        trainer: verl's synchronous ``PPOTrainer``, inside a step, its rollouts asleep.
        num_groups: prompts.
        group_size: rollouts per prompt.
        seed: of the prompts' draw; one per step.

    Returns:
        verl's ``KVBatchMeta``, with advantages in the queue, filtered as training batches are.
    """
    prompts = drawn_prompts(trainer, num_groups, seed)
    prompts["__rollout_n__"] = torch.full((num_groups,), group_size)  # verl's agent loop keeps a config of its own
    changes = {
        "actor_rollout_ref.rollout.n": group_size,
        "data.train_batch_size": num_groups,
        "data.gen_batch_size": None,
        "algorithm.filter_groups": None,  # which would have further training prompts rolled out
        "trainer.v1.sampler.sync_refill_failed_groups": False,
    }
    twin = twin_of(trainer, changes)
    twin.train_dataloader_it = iter([prompts])
    twin.replay_buffer = twin._build_replay_buffer()
    twin.curr_step_profile = False
    twin._update_critic = twin._update_actor = hand_over
    # verl has dropped the engine's weights after the training batch; the policy is still that of the last step
    trainer.checkpoint_manager.update_weights(trainer.global_steps - 1)
    return prepared_by(lambda: twin.step({}, {}))
