# SPDX-License-Identifier: Apache-2.0
"""verl 0.7's own critic around a tiny model, and the driver's part of one step; runs inside a rank of tests.world."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.adapters.verl07.harness import make_config, shard
from tests.world.configs import StandIn
from tests.world.harness import Decoder, answer_of, asked, hash_weights
from tests.world.models.critic import make_critic
from verl.trainer.ppo import core_algos as losses
from verl.workers.critic import DataParallelPPOCritic

__all__ = ["losses", "update"]

FSDP = "critic.model.fsdp_config"


class Critics(StandIn):
    """Stand in for verl's trainer as far as an update of the critic touches it."""

    def _update_critic(self, batch: Any) -> Any:
        return self.critic_wg.update_critic(batch)

    def _get_dp_size(self, group: Any, role: str) -> int:
        return dist.get_world_size()


def update(overrides: list[str], folder: str, batch: Any) -> dict[str, Any]:
    """One update, with ours on where the overrides say so."""
    from gradloc.adapters.verl07.trainer import build_trainer_hook

    paths = [f"{model}.model.path={folder}" for model in ("critic", "actor_rollout_ref")]
    config = make_config([f"{FSDP}.dtype=float32", *paths, *overrides], folder)
    if dist.get_rank() > 0:
        config.actor_rollout_ref.actor.gradloc.dump_dir += f"-rank{dist.get_rank()}"
    config.actor_rollout_ref.actor.bisect_dump_dir = None
    settings = config.critic  # as a dataclass it would load a tokenizer
    settings.ppo_mini_batch_size //= dist.get_world_size()
    wrapped = SimpleNamespace(strategy=settings.strategy, fsdp_config=settings.model.fsdp_config)
    module = shard(make_critic(), wrapped, settings.model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.optim.lr)
    torch.manual_seed(1000)
    critic = DataParallelPPOCritic(settings, module, optimizer)

    def update_critic(sent: Any) -> Any:
        return answer_of(sent, critic.update_critic(sent.chunk(dist.get_world_size())[dist.get_rank()]))

    worker = SimpleNamespace(critic=critic)
    group = SimpleNamespace(update_critic=update_critic, execute_with_func_generator=lambda ask: asked(worker, ask))
    trainer = Critics(config=config, tokenizer=Decoder(), critic_wg=group, global_steps=1, train_dataset=[0])
    trainer.gradloc = build_trainer_hook(trainer)
    trainer.gradloc.begin_step(batch, SimpleNamespace(logger={}))
    metrics = trainer._update_critic(batch).meta_info["metrics"]
    metrics = {name: value[0] for name, value in metrics.items()}
    return {
        "weights": hash_weights(module, optimizer),
        "metrics": metrics,
    }
