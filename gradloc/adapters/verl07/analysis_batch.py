# SPDX-License-Identifier: Apache-2.0
"""The separate analysis batch: verl's ``fit``, stopped at the advantages."""

from typing import Any

from ..verl_common.separate import Prepared, drawn_prompts, prepared_by, twin_of


class _Stop:
    """Stands where the copy's hook stands: does what the original does, up to the analysis, and ends the loop there."""

    def __init__(self, hook: Any):
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    def analyze(self, trainer: Any, batch: Any, metrics: dict, timing_raw: dict) -> bool:
        raise Prepared(batch)


def prepare_batch(trainer: Any, num_groups: int, group_size: int, seed: int) -> Any:
    """Roll out and score a batch that no update will see.

    The rollout draws from the sampler like any other.

    Args:
        trainer: verl's ``RayPPOTrainer``, inside a step.
        num_groups: prompts.
        group_size: rollouts per prompt.
        seed: of the prompts' draw; one per step.

    Returns:
        The batch with advantages, filtered as training batches are.
    """
    batch = drawn_prompts(trainer, num_groups, seed)
    return prepared_by(_twin(trainer, batch, group_size).fit)


def _twin(trainer: Any, batch: Any, group_size: int) -> Any:
    """The trainer with one batch to go; it owns whatever the loop changes on its way."""
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
    twin.train_dataloader = [batch]
    twin.val_reward_fn = None
    twin.gradloc = _Stop(trainer.gradloc)
    # fit() counts from what the checkpoint says to the step that comes after it
    twin._load_checkpoint = lambda: setattr(twin, "global_steps", trainer.global_steps - 1)
    twin._update_critic = lambda prepared: twin.gradloc.analyze(twin, prepared, {}, {})
    return twin
