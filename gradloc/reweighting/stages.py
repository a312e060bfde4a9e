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

_ADDITIVE = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/entropy_loss")
"""Means over all response tokens, of which each stage has its part."""


@dataclass(frozen=True)
class Stage:
    """One of the two updates."""

    name: str
    """``low`` or ``high``: the tokens below the threshold, or the others."""
    mask: torch.Tensor
    """(B, T) bool, a part of the response mask."""


def split(old_log_prob: torch.Tensor, response_mask: torch.Tensor, config: LoptiConfig) -> list[Stage]:
    """Cut the response tokens in two, in the order in which they are to be updated.

    Args:
        old_log_prob: (B, T), of the policy before the update.
        response_mask: (B, T), 1 on response tokens.
        config: threshold or quantile, and order.

    Returns:
        Two stages, disjoint and complete; either may be empty.
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


class Lopti:
    """Runs a step's actor update in two stages."""

    def __init__(self, config: LoptiConfig):
        self.config = config

    def update(
        self,
        old_log_prob: torch.Tensor,
        response_mask: torch.Tensor,
        update_stage: Callable[[Stage, bool], dict[str, Any]],
    ) -> dict[str, Any]:
        """Update the low- and the high-probability tokens one after the other.

        A stage without a token on any rank is left out, and said so.

        Args:
            old_log_prob: (B, T), of the policy before the update.
            response_mask: (B, T), 1 on response tokens.
            update_stage: one whole update of the actor on a stage's tokens, with every other advantage 0; told whether
                it leaves the learning-rate schedule where it is. Returns the update's metrics, a list each.

        Returns:
            The metrics of both: ``lopti/<stage>/*`` apart, and under their own names both together (losses and counts
            added, other values side by side).
        """
        stages = split(old_log_prob, response_mask, self.config)
        filled = [stage for stage in stages if stage.mask.any()] or stages[-1:]
        if len(filled) < len(stages):
            empty = next(stage.name for stage in stages if stage is not filled[0])
            logger.warning(
                "algorithm.lopti: this batch has no %s-probability token, so it is updated in one stage; see "
                "algorithm.lopti.eta and quantile",
                empty,
            )
        keeps = [not self.config.step_lr_each_stage] * (len(filled) - 1) + [False]
        found = [update_stage(stage, keep) for stage, keep in zip(filled, keeps, strict=True)]
        return self._merged(stages, filled, found)

    def _merged(self, stages: list[Stage], filled: list[Stage], found: list[dict[str, Any]]) -> dict[str, Any]:
        together: dict[str, Any] = {}
        for metrics in found:
            for key, value in metrics.items():
                together[key] = value if key not in together else _join(key, together[key], value)
        ours = joined([{key: value[0] for key, value in metrics.items() if _is_one(key, value)} for metrics in found])
        together |= {key: [value] for key, value in ours.items()}
        num_tokens = sum(int(stage.mask.sum()) for stage in stages)
        for stage in stages:
            together[f"lopti/{stage.name}/share"] = [int(stage.mask.sum()) / max(num_tokens, 1)]
        for stage, metrics in zip(filled, found, strict=True):
            for key, value in metrics.items():
                if key.startswith("actor/"):
                    together[f"lopti/{stage.name}/{key.removeprefix('actor/')}"] = value
        return together


def _is_one(key: str, value: Any) -> bool:
    """Whether it is one of the driver's: one number, where verl's own have a list over ranks or micro-batches."""
    return is_ours(key) and len(value) == 1 and isinstance(value[0], int | float)


def _join(key: str, first: Any, second: Any) -> Any:
    """One metric of two updates: a list over ranks, of numbers or of lists over micro-batches, as verl has them."""
    return _added(first, second) if key in _ADDITIVE else [*first, *second]


def _added(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [_added(a, b) for a, b in zip(first, second, strict=True)]
    return first + second
