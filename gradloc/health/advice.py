# SPDX-License-Identifier: Apache-2.0
"""What people do about each reason: names of actions, whose sentences and config lines ``words.advice`` has."""

_MISMATCH = ("weigh_tokens", "eager")
_DRIFT = ("one_epoch", "clip_tokens", "smaller_steps")  # within the step, which the same metrics hold

ADVICE: dict[str, tuple[str, ...]] = {
    "gradient_jump": ("localize", "mask", "clip", "clip_layers"),
    "spikes": ("mask", "clip_layers", "clip_tokens"),
    "head_norm": ("one_epoch", "smaller_steps", "localize"),
    "clip_share": ("clip_less", "smaller_steps", "clip_layers"),
    "non_finite": ("localize", "keep_rollouts", "kl_mse", "fp32"),
    "no_gradient": ("keep_rollouts", "smaller_steps", "more_rollouts", "warmer"),
    "reward_fall": ("go_back", "smaller_steps", "use_kl", "cooler", "keep_rollouts"),
    "entropy_fall": ("clip_higher", "kl_cov", "pay_entropy", "warmer"),
    "entropy_rise": ("no_entropy", "smaller_steps", "clip_high", "localize"),
    "zero_variance": ("warmer", "more_rollouts", "differing_groups"),
    "policy_kl": _DRIFT,
    "reference_kl_jump": ("kl_mse", "localize", "smaller_steps"),
    "clip_fraction": ("one_epoch", "smaller_steps"),
    "mismatch_kl": (*_DRIFT, *_MISMATCH),
    "mismatch_rise": (*_MISMATCH, *_DRIFT),
    "mismatch_chi2": ("localize", *_DRIFT, "drop_sequences", "eager"),
    "mismatch_weight": _MISMATCH,
    "mismatch_spread": ("truncate", "eager"),
    "mismatch_sample_size": ("truncate", "eager"),
    "mismatch_veto": ("veto_less", "eager"),
    "mismatch_probs": ("eager", "weigh_tokens", "fp32"),
    "truncation": ("longer", "keep_rollouts", "by_sequence"),
    "length_rise": ("keep_rollouts", "longer", "by_sequence"),
    "length_fall": ("keep_rollouts", "use_kl"),
    "aborted": ("shorter_prompts", "keep_rollouts"),
}
