# SPDX-License-Identifier: Apache-2.0
"""Weights for tokens and sequences that drifted away from the policy that wrote them.

The ratio is pi_theta / pi_rollout: the policy being trained over the one that sampled the response, engine differences
included. TokenClip bounds each token's ratio, SeqClip each sequence's geometric mean. The published rules of these
names are not public; these are ours. The weight multiplies the token's loss, never exceeds 1 and has no gradient.

Shapes: B rows of the micro-batch, T response positions.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .config import StabilizeConfig

_MAX_LOG_RATIO = 20.0


def ratio_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    level: str,
    mode: str,
    upper: float | None,
    lower: float | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return one weight per token from its own ratio, or from its sequence's.

    Inside the bounds the weight is 1. Outside, ``mask`` gives 0. ``clamp`` gives upper / r above, so that r times its
    weight is the truncated ratio, and r / lower below: the further out of bounds, the less the token counts.

    Args:
        log_ratio: log pi_theta - log pi_rollout (B, T), detached; clamped to +-20 as in verl's rollout correction.
        response_mask: 1 for response tokens (B, T); what is elsewhere in ``log_ratio`` does not matter.
        level: ``token``, or ``geometric`` for the sequence's geometric mean.
        mode: ``mask`` or ``clamp``.
        upper: largest ratio, at least 1; None for no bound.
        lower: smallest ratio, in (0, 1]; None for no bound.

    Returns:
        weights (B, T) in [0, 1], 1 outside the response, NaN where a clamped ratio is; and ``share`` (of response
        tokens out of bounds), ``ratio_max`` and ``ratio_min``. Without response tokens: ones, share 0, ratios 1.
    """
    is_token = response_mask.bool()
    if not is_token.any():
        return torch.ones_like(log_ratio), {"share": 0.0, "ratio_max": 1.0, "ratio_min": 1.0}
    upper = math.inf if upper is None else upper
    lower = 0.0 if lower is None else lower
    log_ratio = log_ratio.where(is_token, 0.0)
    if level == "geometric":
        counts = is_token.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(-1, keepdim=True) / counts).expand_as(log_ratio)
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    is_inside = (ratio >= lower) & (ratio <= upper)  # NaN is not
    if mode == "mask":
        weights = is_inside.to(ratio.dtype)
    else:
        nearest = log_ratio.clamp(math.log(lower) if lower > 0 else -math.inf, math.log(upper))
        weights = torch.exp(-(log_ratio - nearest).abs())
    return weights, {
        "share": (~is_inside)[is_token].float().mean().item(),
        "ratio_max": ratio[is_token].max().item(),
        "ratio_min": ratio[is_token].min().item(),
    }


class TokenWeigher:
    """``token_clip`` and ``seq_clip`` together."""

    def __init__(self, settings: StabilizeConfig):
        clips = (("token_clip", "token", settings.token_clip), ("seq_clip", "geometric", settings.seq_clip))
        self._clips = [clip for clip in clips if clip[2].mode != "off"]

    def token_weights(
        self,
        model_inputs: Mapping[str, Any],
        log_prob: torch.Tensor,
        given: torch.Tensor | None,
        metrics: dict[str, Any],
    ) -> torch.Tensor:
        """Return the factors on the token losses of one micro-batch: ``given`` times the weight of each clip that is
        on.

        Args:
            model_inputs: the micro-batch, with ``rollout_log_probs`` and ``response_mask`` (B, T).
            log_prob: of the current policy (B, T).
            given: factors (B, T) that the trainer computed; None for ones.
            metrics: receives what each clip did.

        Raises:
            ValueError: the batch came without the rollout's log-probs.
        """
        if "rollout_log_probs" not in model_inputs:
            raise ValueError(
                "actor_rollout_ref.actor.gradloc.stabilize.token_clip and seq_clip need the rollout's log-probs, found "
                "none: set actor_rollout_ref.rollout.calculate_log_probs=true, or both modes to off."
            )
        log_ratio = log_prob.detach().float() - model_inputs["rollout_log_probs"]
        for name, level, clip in self._clips:
            weights, numbers = ratio_weights(
                log_ratio, model_inputs["response_mask"], level, clip.mode, clip.upper, clip.lower
            )
            given = weights if given is None else given * weights
            metrics.update({f"gradloc/{name}/{key}": value for key, value in numbers.items()})
        return given
