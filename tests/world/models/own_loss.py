# SPDX-License-Identifier: Apache-2.0
"""A policy loss that a user has registered with verl: no line of ours knows its name."""

from importlib.util import find_spec
from typing import Any

import torch

from tests.world.settings import require

NAME = "softly_weighted"


def register() -> list[str]:
    """Register it; returns the override that trains with it."""
    require(find_spec("verl") is not None, "the registry is verl's")
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

    @register_policy_loss(NAME)
    def _softly_weighted(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        losses = -advantages * torch.nn.functional.softplus(log_prob - old_log_prob)
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

    return [f"actor_rollout_ref.actor.policy_loss.loss_mode={NAME}"]
