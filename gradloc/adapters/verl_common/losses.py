# SPDX-License-Identifier: Apache-2.0
"""What the installed verl's losses do, asked of themselves."""

import copy
from collections.abc import Callable
from typing import Any

import torch

_BY_SEQUENCE = "seq-mean-token-mean"


def changed(config: Any, **values: Any) -> Any:
    """A copy of one of verl's configs, which are frozen, with these values."""
    config = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


def aggregation_of(config: Any) -> str:
    """How the policy loss of verl's actor config averages its tokens: some take sequences whatever ``loss_agg_mode``
    says, and which ones do differs from release to release."""
    by_token, by_sequence = (_policy_loss(config, mode) for mode in ("token-mean", _BY_SEQUENCE))
    return _BY_SEQUENCE if by_token == by_sequence else config.loss_agg_mode


def is_of_micro_batch(config: Any) -> bool:
    """Whether the policy loss is a mean over its micro-batch however large the mini-batch is, as geo_mean's is; on an
    engine that tells the loss how large the mini-batch is."""
    sizes = ({"dp_size": 1, "batch_num_tokens": 4 * times, "global_batch_size": 2 * times} for times in (1, 2))
    once, twice = (_policy_loss(config, config.loss_agg_mode, **of_mini_batch) for of_mini_batch in sizes)
    return once == twice


def _policy_loss(config: Any, mode: str, **of_mini_batch: int) -> float:
    """Of two sequences of one token and of three, with different advantages."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = changed(config, global_batch_info=of_mini_batch)
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    log_prob, advantages = torch.zeros_like(mask), torch.tensor([[1.0], [3.0]]) * mask
    policy_loss = get_policy_loss_fn(config.policy_loss.get("loss_mode", "vanilla"))
    given = {"advantages": advantages, "response_mask": mask, "loss_agg_mode": mode, "config": config}
    return float(policy_loss(old_log_prob=log_prob, log_prob=log_prob, **given)[0])


def weights_of(mask: torch.Tensor, aggregate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Each token's weight in a loss, read off verl's own aggregation, which is linear in the token losses.

    Args:
        mask: (B, T), 1 on response tokens.
        aggregate: token losses (B, T) -> the loss.
    """
    token_losses = torch.zeros_like(mask, dtype=torch.float32, requires_grad=True)
    (weights,) = torch.autograd.grad(aggregate(token_losses), token_losses)
    return weights.nan_to_num()
