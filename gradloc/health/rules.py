# SPDX-License-Identifier: Apache-2.0
"""The rules: which metric of verl's each one reads, how it measures it, what it says, and what people do about it.

``docs/health.md`` names where each rule comes from.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .config import HealthConfig
from .measures import AgainstStart, AgainstWindow, Fall, Jump, Mean, Share, Streak, Value, Window

GRAD_NORM = "actor/grad_norm"
GRAD_NORMS = ("actor/grad_norm_max", GRAD_NORM)
PG_LOSS = "actor/pg_loss"
SCORES = ("critic/score/mean", "critic/rewards/mean")
ENTROPY = ("actor/entropy", "actor/entropy_loss")
REFERENCE_KL = ("actor/kl_loss", "actor/reward_kl_penalty")
ZERO_VARIANCE = "rollout/zero_variance_share"
LENGTH = "response_length/mean"

_ZERO = 1e-8
_MISMATCH_FLOOR = 1e-3  # NeMo-RL's guide: an estimate of the KL below this is normal

Read = Callable[[Mapping[str, float]], tuple[str, float] | None]


@dataclass(frozen=True)
class Rule:
    """One rule; its setting in :class:`~.config.HealthConfig` has its name."""

    name: str
    reads: Read
    """Metrics of a step -> (the metric's name, its value), None where the step does not have it."""
    measured: str
    """How: one of ``MEASURES``."""
    sentence: str
    """With ``{metric}``, ``{found}`` and ``{limit}`` (or both in percent), ``{value}``, ``{typical}``, ``{recent}``."""
    is_strict: bool = False
    """Whether a number at the limit is still within it, as in verl's alert rules."""


def _first(*names: str) -> Read:
    """The first of these metrics that the step has, where it is finite."""

    def read(metrics: Mapping[str, float]) -> tuple[str, float] | None:
        for name in names:
            if name in metrics:
                return (name, metrics[name]) if math.isfinite(metrics[name]) else None
        return None

    return read


def _non_finite(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """1 and the first metric that is not finite; 0 when all are."""
    names = [name for name in (*GRAD_NORMS, PG_LOSS, *REFERENCE_KL, *ENTROPY, *SCORES) if name in metrics]
    for name in names:
        if not math.isfinite(metrics[name]):
            return name, 1.0
    return (names[0], 0.0) if names else None


def _no_gradient(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """1 when gradient and policy loss are both zero. The loss alone is near zero in any on-policy GRPO step."""
    found = [_first(*GRAD_NORMS)(metrics), _first(PG_LOSS)(metrics)]
    if found[0] is None:
        return None
    return found[0][0], float(all(abs(value) <= _ZERO for _, value in filter(None, found)))


def _zero_variance(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """The share, or what verl's own metrics say of it: 1 where all rewards of a batch are equal, else at least 0."""
    if ZERO_VARIANCE in metrics:
        return _first(ZERO_VARIANCE)(metrics)
    ends = [metrics.get(f"critic/score/{end}") for end in ("max", "min")]
    if None in ends or not all(map(math.isfinite, ends)):
        return None
    return "critic/score/{max,min}", float(ends[0] == ends[1])


MEASURES: dict[str, Callable[[HealthConfig, float | None], Window | None]] = {
    "value": lambda config, clip: Value(),
    "size": lambda config, clip: Value(abs),
    "times away from 1": lambda config, clip: Value(lambda weight: max(weight, 1 / weight) if weight > 0 else math.inf),
    "mean": lambda config, clip: Mean(config.recent),
    "streak": lambda config, clip: Streak(),
    "jump": lambda config, clip: Jump(config.warmup, config.window, config.deviations),
    "share over the clip": lambda config, clip: None if clip is None else Share(clip, config.clip_window),
    "fall": lambda config, clip: Fall(config.warmup, config.recent, config.window),
    "against the start": lambda config, clip: AgainstStart(config.warmup, config.recent),
    "against the start, if notable": lambda config, clip: AgainstStart(config.warmup, config.recent, _MISMATCH_FLOOR),
    "against the window": lambda config, clip: AgainstWindow(config.warmup, config.recent, config.window),
}
"""What remembers the run for a rule, of the settings and the clip limit; None where it has nothing to hold on to."""

_TIMES_START = (
    "{metric} is {value} over the last {recent} steps, {found} times the {typical} of the start (limit {limit})."
)
_TIMES_WINDOW = "{metric} is {value} over the last {recent} steps, {found} times its own median of {typical} ({limit})."
_AT_STEP = "{metric} is {value} (limit {limit})."
# verl's actor computes these during the update and replaces what the trainer had computed before it
_IN_UPDATE = "{metric}, of the policy in the update against the rollout engine, is {value} (limit {limit})."

RULES = (
    Rule(
        "gradient_jump",
        _first(*GRAD_NORMS),
        "jump",
        "{metric} is {value} before clipping, {found} times its own median of {typical} (limit {limit} times).",
    ),
    Rule(
        "spikes",
        _first("gradloc/spikes"),
        "value",
        "GradLoc's trigger saw {found} spike(s) in this step; an event names tokens and cause (limit {limit}).",
    ),
    Rule(
        "head_norm",
        _first("gradloc/head_grad_norm"),
        "jump",
        "The output head's gradient norm is {value}, {found} times its own median of {typical} (limit {limit} times): "
        "the policy moves at least that far.",
    ),
    Rule(
        "clip_share",
        _first(GRAD_NORM),
        "share over the clip",
        "{percent} of the last {clip_window} steps were over the clip limit of {typical} (limit {percent_limit}).",
    ),
    Rule("non_finite", _non_finite, "streak", "{metric} is not finite, {found} step(s) in a row (limit {limit})."),
    Rule(
        "no_gradient",
        _no_gradient,
        "streak",
        "Gradient and policy loss are zero, {found} step(s) in a row (limit {limit}): nothing is learned.",
    ),
    Rule(
        "reward_fall",
        _first(*SCORES),
        "fall",
        "{metric} fell by {percent} (limit {percent_limit}), from {typical} to {value} (means of {recent} steps).",
    ),
    Rule("entropy_fall", _first(*ENTROPY), "against the start", _TIMES_START),
    Rule("entropy_rise", _first(*ENTROPY), "against the start", _TIMES_START),
    Rule(
        "zero_variance",
        _zero_variance,
        "mean",
        "{percent} of the prompts had one reward for all their rollouts, over {recent} steps (limit {percent_limit}).",
    ),
    Rule("policy_kl", _first("actor/ppo_kl"), "size", _AT_STEP),
    Rule(
        "reference_kl_jump",
        _first(*REFERENCE_KL),
        "jump",
        "{metric} is {value}, {found} times its own median of {typical} (limit {limit} times).",
    ),
    Rule(
        "clip_fraction",
        _first("actor/pg_clipfrac"),
        "mean",
        "PPO's clip cut {percent} of the tokens off, over {recent} steps (limit {percent_limit}).",
    ),
    Rule("mismatch_kl", _first("rollout_corr/kl"), "size", _IN_UPDATE, is_strict=True),
    Rule("mismatch_rise", _first("rollout_corr/k3_kl"), "against the start, if notable", _TIMES_START),
    Rule("mismatch_chi2", _first("rollout_corr/chi2_token"), "value", _IN_UPDATE, is_strict=True),
    Rule(
        "mismatch_weight",
        _first("rollout_corr/rollout_is_mean"),
        "times away from 1",
        "{metric} is {value}, {found} times away from 1 (limit {limit} times).",
        is_strict=True,
    ),
    Rule("mismatch_spread", _first("rollout_corr/rollout_is_std"), "value", _AT_STEP, is_strict=True),
    Rule("mismatch_sample_size", _first("rollout_corr/rollout_is_eff_sample_size"), "value", _AT_STEP, is_strict=True),
    Rule("mismatch_veto", _first("rollout_corr/rollout_is_veto_fraction"), "value", _AT_STEP, is_strict=True),
    Rule("mismatch_probs", _first("training/rollout_probs_diff_mean"), "value", _AT_STEP, is_strict=True),
    Rule(
        "truncation",
        _first("response_length/clip_ratio"),
        "mean",
        "{percent} of the responses ended at the length limit, over {recent} steps (limit {percent_limit}).",
    ),
    Rule("length_rise", _first(LENGTH), "against the window", _TIMES_WINDOW),
    Rule("length_fall", _first(LENGTH), "against the window", _TIMES_WINDOW),
    Rule(
        "aborted",
        _first("response/aborted_ratio"),
        "value",
        "{percent} of the responses are empty (limit {percent_limit}).",
        is_strict=True,
    ),
)

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
"""What people do about each reason: names of actions, whose sentences and config lines ``words.advice`` has."""

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
"""TRL's metrics, and the names by which the rules read them."""
