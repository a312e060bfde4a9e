# SPDX-License-Identifier: Apache-2.0
"""The rollout filter as verl's trainer applies it: to a batch, its rewards, and what came with them."""

import math
from typing import Any

import numpy as np
import torch

from ...rollout_filter.choose import advantage_scale, kept_groups
from ...rollout_filter.config import FilterSettings
from ...rollout_filter.groups import groups_of

FILTER_KEY = "gradloc_filter"
"""In a filtered batch's meta info: what the filter did, in numbers."""


class RolloutFilter:
    """Keeps the groups worth training on."""

    def __init__(self, settings: FilterSettings):
        self.settings = settings

    def __call__(self, trainer: Any, batch: Any, rewards: torch.Tensor, extras: dict[str, Any], metrics: dict) -> tuple:
        """Keep the groups that the filter chooses.

        Args:
            trainer: balances the smaller batch and knows the ranks.
            batch: with uid, response_mask and attention_mask.
            rewards: (R, T) token-level scores.
            extras: per-row lists that the reward function returned.
            metrics: of the step; ``rollout/*`` is added.

        Returns:
            batch, rewards and extras of the rows kept.
        """
        groups = groups_of(batch.non_tensor_batch["uid"], rewards, batch.batch["response_mask"])
        found = kept_groups(groups, self.settings, _num_ranks(trainer), metrics)
        if found is None:
            return batch, rewards, extras
        kept, batch.meta_info[FILTER_KEY] = found
        if len(kept) == len(groups):
            return batch, rewards, extras
        rows = np.flatnonzero(np.isin(groups.of_row, kept))
        batch.batch["token_level_scores"] = rewards  # travels with the rows; fit() sets it to the same later
        batch.non_tensor_batch.update({key: np.array(value) for key, value in extras.items()})
        batch = batch.select_idxs(rows)
        if trainer.config.trainer.balance_batch:
            trainer._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return (
            batch,
            batch.batch.pop("token_level_scores"),
            {key: batch.non_tensor_batch[key].tolist() for key in extras},
        )

    def scale_advantages(self, batch: Any) -> None:
        """Scale a filtered batch's advantages as ``filter_loss_scaling`` says; others stay the very same tensor."""
        kept_ratio = batch.meta_info.get(FILTER_KEY, {}).get("kept_ratio", 1.0)
        scale = advantage_scale(self.settings.loss_scaling, kept_ratio)
        if scale != 1.0:
            batch.batch["advantages"] = batch.batch["advantages"] * scale


def _num_ranks(trainer: Any) -> int:
    """What the number of rows must be a multiple of."""
    sizes = [trainer._get_dp_size(trainer.actor_rollout_wg, "actor")]
    if trainer.use_critic:
        sizes.append(trainer._get_dp_size(trainer.critic_wg, "critic"))
    return math.lcm(*sizes)
