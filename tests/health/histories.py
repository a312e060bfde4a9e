# SPDX-License-Identifier: Apache-2.0
"""Synthetic histories: a healthy run of any length, and what makes each rule speak."""

from dataclasses import dataclass

from gradloc.report.runs.health import HealthConfig, Judge

CALM = 30
"""Healthy steps before the trouble begins: over the warm-up and over the clip window."""


def healthy(step):
    """A step's metrics in a run that is well, with a scatter that repeats every five steps."""
    wobble = (0.0, 0.04, -0.03, 0.02, -0.04)[step % 5]
    return {
        "actor/grad_norm": 0.4 + wobble,
        "actor/grad_norm_max": 0.6 + wobble,
        "actor/pg_loss": 0.01 + wobble / 10,
        "actor/kl_loss": 0.002 + wobble / 100,
        "actor/ppo_kl": 0.001 + wobble / 100,
        "actor/pg_clipfrac": 0.02,
        "actor/entropy": 0.3 + wobble / 10,
        "critic/vf_loss": 0.5,
        "critic/score/mean": 0.5 + wobble,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "rollout/zero_variance_share": 0.25 + wobble,
        "rollout_corr/kl": 0.0005,
        "rollout_corr/k3_kl": 0.0006,
        "rollout_corr/chi2_token": 0.001,
        "rollout_corr/rollout_is_mean": 1.0,
        "rollout_corr/rollout_is_std": 0.05,
        "rollout_corr/rollout_is_eff_sample_size": 0.95,
        "rollout_corr/rollout_is_veto_fraction": 0.0,
        "training/rollout_probs_diff_mean": 0.002,
        "rollout_corr/log_prob_abs_diff": 0.02,
        "response_length/mean": 200 * (1 + wobble),
        "response_length/clip_ratio": 0.05,
        "response/aborted_ratio": 0.0,
        "gradloc/spikes": 0.0,
        "gradloc/head_grad_norm": 0.2 + wobble / 4,
        "perf/throughput": 1234.5,
    }


@dataclass(frozen=True)
class Trouble:
    """What a rule is to find: metrics that replace the healthy ones for some steps."""

    rule: str
    state: str
    metrics: dict
    steps: int = 1
    """For so many steps in a row; the state is reached at the last of them at the latest."""


NAN = float("nan")
RECENT = HealthConfig().recent
STILL = {"actor/grad_norm": 0.0, "actor/grad_norm_max": 0.0, "actor/pg_loss": 0.0}
TROUBLES = (
    Trouble("gradient_jump", "warning", {"actor/grad_norm_max": 15.0}),
    Trouble("gradient_jump", "danger", {"actor/grad_norm_max": 111.0}),
    Trouble("spikes", "warning", {"gradloc/spikes": 1.0}),
    Trouble("head_norm", "warning", {"gradloc/head_grad_norm": 3.0}),
    Trouble("clip_share", "warning", {"actor/grad_norm": 1.5, "actor/grad_norm_max": 1.9}, 18),
    Trouble("non_finite", "warning", {"actor/grad_norm": NAN, "actor/grad_norm_max": NAN}),
    Trouble("non_finite", "danger", {"actor/pg_loss": float("inf")}, 3),
    Trouble("no_gradient", "warning", STILL),
    Trouble("no_gradient", "danger", STILL, 3),
    Trouble("reward_fall", "warning", {"critic/score/mean": 0.3}, RECENT),
    Trouble("reward_fall", "danger", {"critic/score/mean": 0.05}, RECENT),
    Trouble("entropy_fall", "warning", {"actor/entropy": 0.06}, RECENT),
    Trouble("entropy_fall", "danger", {"actor/entropy": 0.02}, RECENT),
    Trouble("entropy_rise", "warning", {"actor/entropy": 0.7}, RECENT),
    Trouble("entropy_rise", "danger", {"actor/entropy": 1.6}, RECENT),
    Trouble("zero_variance", "warning", {"rollout/zero_variance_share": 0.8}, RECENT),
    Trouble("zero_variance", "danger", {"rollout/zero_variance_share": 1.0}, RECENT),
    Trouble("policy_kl", "warning", {"actor/ppo_kl": -0.2}),
    Trouble("policy_kl", "danger", {"actor/ppo_kl": 1.5}),
    Trouble("reference_kl_jump", "warning", {"actor/kl_loss": 0.05}),
    Trouble("reference_kl_jump", "danger", {"actor/kl_loss": 7.0}),
    Trouble("clip_fraction", "warning", {"actor/pg_clipfrac": 0.4}, RECENT),
    Trouble("clip_fraction", "danger", {"actor/pg_clipfrac": 0.7}, RECENT),
    Trouble("mismatch_kl", "warning", {"rollout_corr/kl": -0.15}),
    Trouble("mismatch_rise", "warning", {"rollout_corr/k3_kl": 0.02}, RECENT),
    Trouble("mismatch_chi2", "warning", {"rollout_corr/chi2_token": 1.2}),
    Trouble("mismatch_chi2", "danger", {"rollout_corr/chi2_token": 120.0}),
    Trouble("mismatch_weight", "warning", {"rollout_corr/rollout_is_mean": 0.4}),
    Trouble("mismatch_spread", "warning", {"rollout_corr/rollout_is_std": 1.1}),
    Trouble("mismatch_sample_size", "warning", {"rollout_corr/rollout_is_eff_sample_size": 0.2}),
    Trouble("mismatch_veto", "warning", {"rollout_corr/rollout_is_veto_fraction": 0.2}),
    Trouble("mismatch_probs", "warning", {"training/rollout_probs_diff_mean": 0.02}),
    Trouble("mismatch_log_probs", "warning", {"rollout_corr/log_prob_abs_diff": 0.3}, RECENT),
    Trouble("mismatch_log_probs", "danger", {"rollout_corr/log_prob_abs_diff": 0.6}, RECENT),
    Trouble("truncation", "warning", {"response_length/clip_ratio": 0.3}, RECENT),
    Trouble("truncation", "danger", {"response_length/clip_ratio": 0.6}, RECENT),
    Trouble("length_rise", "warning", {"response_length/mean": 500.0}, RECENT),
    Trouble("length_rise", "danger", {"response_length/mean": 1000.0}, RECENT),
    Trouble("length_fall", "warning", {"response_length/mean": 80.0}, RECENT),
    Trouble("length_fall", "danger", {"response_length/mean": 20.0}, RECENT),
    Trouble("aborted", "warning", {"response/aborted_ratio": 0.06}),
)


def run(rows, config=None, grad_clip=1.0, judge=None, first=1):
    """Return the judgements of a list of metrics, one per step from ``first`` on."""
    judge = judge or Judge(config or HealthConfig(), grad_clip)
    return [judge.observe(first + index, row) for index, row in enumerate(rows)]


def with_trouble(trouble, calm=CALM, after=0):
    """Return the metrics of a healthy run that gets into trouble."""
    rows = [healthy(step) for step in range(1, calm + trouble.steps + after + 1)]
    for row in rows[calm : calm + trouble.steps]:
        row.update(trouble.metrics)
    return rows


def named(verdict):
    """Return reason -> state."""
    return {reason.name: reason.state for reason in verdict.reasons}
