# SPDX-License-Identifier: Apache-2.0
"""What the installed verl's losses do, asked of themselves."""

import copy
from typing import Any

import torch

from verl.trainer.ppo.core_algos import get_policy_loss_fn

__all__ = ["aggregation_of"]

_BY_SEQUENCE = "seq-mean-token-mean"


def aggregation_of(config: Any) -> str:
    """How the policy loss averages its tokens: some take sequences whatever ``loss_agg_mode`` says, and which ones do
    differs from release to release.

    Args:
        config: verl's actor config.
    """
    config = copy.copy(config)
    object.__setattr__(config, "global_batch_info", {})  # verl freezes its configs
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    given = {
        "old_log_prob": torch.zeros_like(mask),
        "log_prob": torch.zeros_like(mask),
        "advantages": torch.tensor([[1.0], [3.0]]) * mask,
        "response_mask": mask,
        "config": config,
    }
    policy_loss = get_policy_loss_fn(config.policy_loss.get("loss_mode", "vanilla"))
    by_token, by_sequence = (
        float(policy_loss(**given, loss_agg_mode=mode)[0]) for mode in ("token-mean", _BY_SEQUENCE)
    )
    return _BY_SEQUENCE if by_token == by_sequence else config.loss_agg_mode
