# SPDX-License-Identifier: Apache-2.0
"""Advantage Reweighting: the less likely a token was, the more its advantage is scaled down."""

import torch


def reweight(advantages: torch.Tensor, old_log_prob: torch.Tensor, alpha: float) -> torch.Tensor:
    """``[alpha * pi_old + (1 - alpha)] * A`` (arXiv 2505.12929).

    Args:
        advantages: (B, T).
        old_log_prob: (B, T), of the policy before the update; padding may hold anything finite.
        alpha: in [0, 1].

    Returns:
        (B, T), in the dtype of ``advantages``. A token of probability 1 keeps its advantage; one of probability 0 keeps
        the share ``1 - alpha`` of it.
    """
    return advantages * (alpha * old_log_prob.exp() + (1 - alpha)).to(advantages.dtype)


def kept_share(before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the share of the tokens' absolute advantages (B, T) that is left."""
    total = before[mask].abs().sum()
    return float(after[mask].abs().sum() / total) if total > 0 else 1.0
