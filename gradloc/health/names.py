# SPDX-License-Identifier: Apache-2.0
"""TRL's metrics, and the names by which the rules of health read them. Standard library only."""

FROM_TRL = {
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "reward": "critic/score/mean",
    "frac_reward_zero_std": "rollout/zero_variance_share",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "sampling/importance_sampling_ratio/mean": "rollout_corr/rollout_is_mean",
}
