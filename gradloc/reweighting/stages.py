# SPDX-License-Identifier: Apache-2.0
"""Lopti: one rollout, two updates, the tokens split by their probability under the old policy.

Each stage goes through the actor's whole update. Its batch carries the stage's mask: advantages outside are zero, and
the actor leaves the other tokens out of the KL and entropy terms. Denominators stay all response tokens, so that at
frozen weights the two stages' gradients add up to the ordinary one. The old log-probs are those from before both.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..loop.metrics import is_ours, joined
from .config import LoptiConfig

logger = logging.getLogger(__name__)

STAGE_MASK_KEY = "lopti_mask"
"""Batch tensor (B, T), 1 on the stage's tokens; the actor reads it."""

_ADDITIVE = frozenset(
    "actor/loss actor/pg_loss actor/kl_loss actor/entropy actor/entropy_loss actor/pg_clipfrac "
    "actor/pg_clipfrac_lower gradloc/skip_step/skipped gradloc/layer_clip/nonfinite".split()
)
"""Means over all response tokens, where each stage has a part, and counts of each rank."""


@dataclass(frozen=True)
class Stage:
    """One of the two updates: the tokens below the threshold (``low``) or the others (``high``)."""

    name: str
    mask: torch.Tensor
    """(B, T) bool, a part of the response mask."""


def split(old_log_prob: torch.Tensor, response_mask: torch.Tensor, config: LoptiConfig) -> list[Stage]:
    """Cut the response tokens in two, disjoint and complete, in the order of their updates; either may be empty.

    Args:
        old_log_prob: (B, T), of the policy before the update.
        response_mask: (B, T), 1 on response tokens.
        config: threshold or quantile, and order.
    """
    tokens = response_mask.bool()
    prob = old_log_prob.float().exp()
    threshold = abs(config.eta)
    if config.quantile is not None:
        # sorted by hand: torch.quantile takes at most 2**24 values
        values = prob[tokens].sort().values
        threshold = values[int(config.quantile * len(values))] if len(values) else 0.0
    is_low = tokens & (prob < threshold)
    stages = [Stage("low", is_low), Stage("high", tokens & ~is_low)]
    return stages if config.eta >= 0 else stages[::-1]


def update_in_stages(
    config: LoptiConfig,
    old_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    update_stage: Callable[[Stage, bool], dict[str, Any]],
) -> dict[str, Any]:
    """Update the low- and the high-probability tokens one after the other.

    A stage without a token on any rank is left out, with a warning.

    Args:
        config: of the split and of the learning-rate schedule.
        old_log_prob: (B, T), of the policy before the update.
        response_mask: (B, T), 1 on response tokens.
        update_stage: (stage, whether the learning-rate schedule stays where it is) -> one whole update of the actor
            on the stage's tokens, with every other advantage 0. Returns the update's metrics, a list each.

    Returns:
        The metrics of both: ``lopti/<stage>/*`` for each, and under their own names those of both together (losses
        and counts added, other values side by side).
    """
    stages = split(old_log_prob, response_mask, config)
    filled = [stage for stage in stages if stage.mask.any()] or stages[-1:]
    if len(filled) < len(stages):
        empty = next(stage.name for stage in stages if stage is not filled[0])
        logger.warning(
            "algorithm.lopti: this batch has no %s-probability token, so it is updated in one stage; see "
            "algorithm.lopti.eta and quantile",
            empty,
        )
    metrics = [update_stage(stage, not config.step_lr_each_stage and stage is not filled[-1]) for stage in filled]
    num_tokens = sum(int(stage.mask.sum()) for stage in stages)
    shares = {f"lopti/{stage.name}/share": [int(stage.mask.sum()) / max(num_tokens, 1)] for stage in stages}
    return merged([stage.name for stage in filled], metrics) | shares


def merged(names: list[str], updates: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stages' metrics, of both together and of each.

    As verl has them, a metric is a list over ranks, of numbers or of lists.
    """
    found: dict[str, Any] = {}
    for metrics in updates:
        for key, values in metrics.items():
            if key not in found:
                found[key] = values
            elif key in _ADDITIVE:
                found[key] = _sum(found[key], values)
            else:
                found[key] = [*found[key], *values]
    # the driver's metrics are one number each
    from_driver = [
        {key: values[0] for key, values in metrics.items() if _is_from_driver(key, values)} for metrics in updates
    ]
    found |= {key: [value] for key, value in joined(from_driver).items()}
    for name, metrics in zip(names, updates, strict=True):
        for key, values in metrics.items():
            if key.startswith("actor/"):
                found[f"lopti/{name}/{key.removeprefix('actor/')}"] = values
    return found


def _is_from_driver(key: str, values: list[Any]) -> bool:
    return is_ours(key) and len(values) == 1 and isinstance(values[0], int | float)


def _sum(first: Any, second: Any) -> Any:
    """Add metrics element by element."""
    if isinstance(first, list):
        return [_sum(left, right) for left, right in zip(first, second, strict=True)]
    return first + second
