# SPDX-License-Identifier: Apache-2.0
"""The driver of a run of verl's: built from verl's config, and told of a batch as verl deals it out."""

from dataclasses import replace
from typing import Any

import torch

from ...loop.driver import Driver
from ...loop.wire import Policy
from ...record import Run
from ...record.origin import origin


def build_driver(config: Any, settings: Any, tokenizer: Any, model: str = "actor") -> "VerlDriver":
    """The driver of the updates of a run's ``actor`` or ``critic``; ``config`` is the trainer's whole config."""
    from omegaconf import OmegaConf

    shared, num_rollouts = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    trained, path, action_key = shared.actor, shared.model.path, "action.mode"
    if model == "critic":
        trained, path, action_key = config.critic, config.critic.model.path, "critic"
        settings = _of_critic(settings)
    plain: Any = OmegaConf.to_container(trained, resolve=True)
    of_run: Any = OmegaConf.to_container(config)
    if model == "actor" and OmegaConf.select(config, "distillation.enabled"):
        plain["distillation_loss"] = OmegaConf.to_container(config.distillation.distillation_loss, resolve=True)
    names = config.trainer.project_name, config.trainer.experiment_name
    run = origin(Run(*names, model=path, estimator=_estimator(config.algorithm), rollouts=num_rollouts), of_run)
    epochs = trained.ppo_epochs
    driver = VerlDriver(settings, tokenizer=tokenizer, run=run, trained=plain, num_epochs=epochs, model=model)
    driver.sequences_per_mini_batch = trained.ppo_mini_batch_size * num_rollouts
    driver.action_key = f"actor_rollout_ref.actor.gradloc.{action_key}"
    return driver


class VerlDriver(Driver):
    """A driver that knows how verl deals rows out."""

    sequences_per_mini_batch: int
    """Rollouts, over all ranks."""
    of_step: tuple[dict[str, float], ...] = ()
    """The metrics of each update of the trainer's present step."""
    _global_step = -1

    def before_batch(self, response_mask: torch.Tensor, global_step: int, dp_size: int, stage: str = "") -> Policy:
        """The policy of the update that comes next: see :meth:`~...loop.driver.Driver.before_update` and below."""
        if global_step != self._global_step:
            self._global_step, self.of_step = global_step, ()
        num_tokens = tokens_per_mini_batch(response_mask, dp_size, self.sequences_per_mini_batch)
        return self.before_update(num_tokens, global_step, stage)


def tokens_per_mini_batch(response_mask: torch.Tensor, dp_size: int, sequences_per_mini_batch: int) -> list[int]:
    """Response tokens of each mini-batch over all ranks, as verl deals rows out: to ranks in equal runs, each of which
    is cut into mini-batches in order.

    Args:
        response_mask: (R, T), in the order in which the rows are dealt out.
        dp_size: data-parallel ranks.
        sequences_per_mini_batch: over all ranks.
    """
    per_row = response_mask.sum(-1)
    rows_per_rank = len(per_row) // dp_size
    rows_each = max(sequences_per_mini_batch // dp_size, 1)
    by_rank = per_row[: rows_per_rank * dp_size].view(dp_size, rows_per_rank)
    return [int(chunk.sum()) for chunk in by_rank.split(rows_each, dim=1)]


def _estimator(algorithm: Any) -> str | None:
    """By the record's names; None where the rewards are not the scores, since they hold a KL penalty."""
    name = str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator)).removesuffix("_vectorized")
    if algorithm.use_kl_in_reward:
        return None
    return "grpo_mean" if name == "grpo" and not algorithm.norm_adv_by_std_in_grpo else name


def _of_critic(settings: Any) -> Any:
    """The actor's settings as they hold for the critic: its own action, and nothing that only a replay uses."""
    return replace(
        settings,
        enable=True,
        stabilize=type(settings.stabilize)(),
        action=replace(settings.action, mode=settings.critic),
        evidence=replace(settings.evidence, bundle="off", checkpoint="off"),
    )
