# SPDX-License-Identifier: Apache-2.0
"""What the installed verl's losses do, asked of themselves."""

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from ...core.step import Groups
from ...reweighting.advantages import reweight
from ...stabilize.config import SeqClipConfig, StabilizeConfig, TokenClipConfig
from ...stabilize.ratio_clip import TokenWeigher

ALPHA = 0.3
"""Of Advantage Reweighting, as the advice has it."""
_BY_SEQUENCE = "seq-mean-token-mean"


def changed(config: Any, **values: Any) -> Any:
    """A copy of one of verl's configs, which are frozen, with these values; ``policy_loss.loss_mode`` is in a block."""
    config = copy.copy(config)
    for name, value in values.items():
        name, _, inner = name.partition(".")
        value = changed(config[name], **{inner: value}) if inner else value
        if isinstance(config, MutableMapping):
            config[name] = value
        else:
            object.__setattr__(config, name, value)
    return config


def setting_of(config: Any, name: str) -> Any:
    """The value of one of these names in one of verl's configs; LookupError or AttributeError without."""
    for part in name.split("."):
        config = config[part]
    return config


_EPSILON = 1e-6
"""What verl's GRPO adds to a group's standard deviation before it divides."""


def tensors_under(
    name: str,
    held: Mapping[str, torch.Tensor],
    log_prob: torch.Tensor,
    rows: Sequence[int],
    groups: Groups | None,
    has_ratio_clips: bool,
) -> dict[str, torch.Tensor] | None:
    """See :meth:`~...core.step.OwnLoss.tensors_under`; tensors are (B, T).

    Args:
        name: of the action.
        held: those of the micro-batch, by verl's names.
        log_prob: of the step's forward.
        rows: their numbers on the driver.
        groups: from the driver.
        has_ratio_clips: whether ``token_clip`` or ``seq_clip`` weigh its tokens.
    """
    if groups is None or len(rows) != len(log_prob):
        return None
    if name in _BY_WEIGHTS:
        weights = _BY_WEIGHTS[name](held, log_prob, has_ratio_clips)
        return None if weights is None else {WEIGHTS: weights}
    advantages = held["advantages"]
    if name == "reweight" and not groups.is_reweighted:
        return {"advantages": reweight(advantages, held["old_log_probs"], ALPHA)}
    if name == "divide" and groups.spreads:
        spreads = advantages.new_tensor([groups.spreads[row] for row in rows]).unsqueeze(1)
        return {"advantages": advantages / (spreads + _EPSILON)}
    return None


WEIGHTS = "rollout_is_weights"
"""What verl multiplies token losses with: its rollout correction's, and those of our clips on ratios."""
_TRUNCATED = 1.5
_TIS = 2.0  # verl's default, where it weighs tokens by trainer over engine


def _truncated(held: Mapping[str, torch.Tensor], *_: Any) -> torch.Tensor | None:
    return held[WEIGHTS].clamp(max=_TRUNCATED) if WEIGHTS in held else None


def _by_engine(held: Mapping[str, torch.Tensor], *_: Any) -> torch.Tensor | None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    if WEIGHTS in held or "rollout_log_probs" not in held:
        return None
    log_ratio = held["old_log_probs"] - held["rollout_log_probs"]
    given = {"rollout_is": "token", "rollout_is_threshold": _TIS}
    return compute_rollout_correction_weights(log_ratio, held["response_mask"], **given)[0]


def _clipped(
    settings: StabilizeConfig, held: Mapping[str, torch.Tensor], log_prob: torch.Tensor, has_ratio_clips: bool
) -> torch.Tensor | None:
    if has_ratio_clips or "rollout_log_probs" not in held:
        return None
    return TokenWeigher(settings).token_weights(held, log_prob, held.get(WEIGHTS), {})


_BY_WEIGHTS: dict[str, Callable[..., torch.Tensor | None]] = {
    "truncate": _truncated,
    "weigh_tokens": _by_engine,
    "clip_tokens": partial(_clipped, StabilizeConfig(token_clip=TokenClipConfig(mode="clamp"))),
    "clip_sequences": partial(_clipped, StabilizeConfig(seq_clip=SeqClipConfig(mode="clamp"))),
}
"""Actions that weigh token losses otherwise; None where that is in force, or not known."""


def aggregation_of(config: Any) -> str:
    """How the policy loss of verl's actor config averages its tokens: some take sequences whatever ``loss_agg_mode``
    says, and which ones do differs from release to release."""
    by_token, by_sequence = (_policy_loss(config, mode) for mode in ("token-mean", _BY_SEQUENCE))
    return _BY_SEQUENCE if by_token == by_sequence else config.loss_agg_mode


def is_of_micro_batch(config: Any) -> bool:
    """Whether the policy loss is a mean over its micro-batch however large the mini-batch is, as geo_mean's is; on an
    engine that tells the loss how large the mini-batch is."""
    sizes = ({"dp_size": 1, "batch_num_tokens": 4 * times, "global_batch_size": 2 * times} for times in (1, 2))
    once, twice = (_policy_loss(config, config.loss_agg_mode, **batch_info) for batch_info in sizes)
    return once == twice


def _policy_loss(config: Any, mode: str, **batch_info: int) -> float:
    """Of two sequences of one token and of three, with different advantages."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = changed(config, global_batch_info=batch_info)
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
