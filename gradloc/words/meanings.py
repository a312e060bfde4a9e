# SPDX-License-Identifier: Apache-2.0
"""What each cause means, what its numbers say, and what people do about it. Pure, standard library only."""

import math
import statistics
from dataclasses import dataclass

from ..record import Culprit, Event
from .advice import actions_of
from .causes import GROUPED
from .leader import leader
from .numbers import number

_SLACK = 1.01
"""On what an estimator gives at most, for what it adds to the standard deviation and for rounding."""
_FROM_ZERO = 0.5
"""Of the mean size in a group: from there on a mean is not 0. Weights on unlikely tokens move it by less."""
_ROUNDING = 1e-6
"""Of a reward: rewards that differ by less are equal."""


@dataclass(frozen=True)
class Meaning:
    """One cause."""

    title: str
    means: str
    actions: tuple[str, ...]
    """By name, the likeliest to help first."""

    def advice(self, trainer: str | None, strategy: str = "") -> list[tuple[str, str]]:
        """Pairs of what to do and its config line.

        Args:
            trainer: what made the run.
            strategy: the search's: the published bisection alone counts probes.
        """
        probes = {"more_steps": "more_probes"} if strategy == "bisect" else {}
        return actions_of([probes.get(name, name) for name in self.actions], trainer)


MEANINGS = {
    "token_mismatch": Meaning(
        "The policy moved away from the old one at a token",
        "The importance ratio of this token is far from 1, and the loss multiplies the gradient with it.",
        ("mask", "clip_tokens", "dual_clip", "clip_high", "one_epoch", "weigh_tokens"),
    ),
    "sequence_mismatch": Meaning(
        "The policy moved away from the old one over a whole sequence",
        "Not one token but the whole response has become likelier or less likely than when it was sampled.",
        ("clip_sequences", "gspo", "drop_sequences", "one_epoch"),
    ),
    "layer_heterogeneity": Meaning(
        "Some layers explode while others stay calm",
        "The gradient's size is concentrated in a few layers; clipping the global norm then starves all the others.",
        ("clip_layers", "smaller_steps", "clip"),
    ),
    "large_jacobian": Meaning(
        "The model is extremely sensitive at a token",
        "The gradient of the token's log-prob alone is far larger than other tokens', before the loss weighs it.",
        ("mask", "clip", "smaller_steps", "warm_up", "fp32"),
    ),
    "extreme_advantage": Meaning(
        "The advantage is extreme",
        "The advantage of this token is far outside what the batch has; the gradient is proportional to it.",
        ("keep_rollouts", "mask", "mean_only", "clip"),
    ),
    "low_probability": Meaning(
        "A token of very low probability",
        "The gradient of a log-prob goes with 1 - p: unlikely tokens have the largest ones (arXiv 2505.12929).",
        ("reweight", "lopti", "less_tail", "veto", "clip"),
    ),
    "kl_term": Meaning(
        "The KL penalty",
        "The reference policy all but excludes this token, and the penalty's gradient dominates the loss there.",
        ("kl_mse", "less_kl"),
    ),
    "entropy_term": Meaning(
        "The entropy term",
        "The entropy bonus has a far larger coefficient than the policy loss, and makes the gradient nearly alone.",
        ("no_entropy",),
    ),
    "is_weight": Meaning(
        "The weight of the rollout correction",
        "Trainer and rollout engine disagree about this token, and the correction multiplies its gradient.",
        ("truncate", "mean_weight", "veto"),
    ),
    "value_outlier": Meaning(
        "The value is far from the return",
        "The critic predicts something else than what came; its gradient is proportional to the difference.",
        ("mask_critic", "keep_rollouts", "bound_value", "critic_first", "clip_critic"),
    ),
    "non_finite": Meaning(
        "A loss without a finite gradient",
        "A NaN or an infinity entered the loss at this token; verl skips such a step, and the next may have it again.",
        ("keep_rollouts", "kl_mse", "fp32"),
    ),
    "spurious_token": Meaning(
        "An unlikely token that was rewarded by accident",
        "Low probability, low entropy and a positive advantage: the model was sure of another token, and the reward of "
        "the whole response now pushes this one up (STAPO, arXiv 2602.15620).",
        ("mask", "reweight", "less_tail", "keep_rollouts"),
    ),
    "not_sampled": Meaning(
        "The policy never sampled a token",
        "The log-prob that came with it is none that sampling gives: exactly 0, or far from the trainer's, which has "
        "not moved. A template or a tool loop appended the token, or the text was tokenized again.",
        ("mask", "veto", "keep_rollouts"),
    ),
    "shifted_log_probs": Meaning(
        "The rollout's log-probs are shifted by one",
        "Over the whole response, what the engine says of a token is what the trainer says of its neighbour.",
        ("mask", "veto", "keep_rollouts"),
    ),
    "non_finite_forward": Meaning(
        "A forward that is not finite, with finite weights",
        "The log-probs themselves are NaN or infinite from a token on, though every weight is finite: an activation "
        "overflowed, or attention saw no key.",
        ("fp32_forward", "padded", "not_compiled", "keep_weights"),
    ),
    "non_finite_backward": Meaning(
        "A backward that is not finite, of a loss that is",
        "Log-probs, advantage and the loss's own derivative are finite; NaN or infinity comes up on the way back "
        "through the model: a gradient overflowed, or a kernel is wrong.",
        ("fp32_forward", "padded", "not_compiled", "keep_weights"),
    ),
    "non_finite_padding": Meaning(
        "Only padding is not finite",
        "A NaN or an infinity stands at positions outside of the response mask. The loss leaves them out of its sum, "
        "but zero times NaN is NaN in the backward.",
        ("plain_loss", "kl_mse", "keep_rollouts"),
    ),
    "non_finite_weights": Meaning(
        "Weights that are not finite",
        "The named parameters hold NaN or infinity, so every forward does. No token of this step did it: an earlier "
        "step, a checkpoint or the optimizer's state did.",
        ("go_back", "fp32", "smaller_steps"),
    ),
    "replicas_differ": Meaning(
        "Replicas whose weights have parted",
        "Ranks that are to hold the same weights hold others: one skipped a step or loaded something else, or their "
        "gradients are not summed. Each then trains a model of its own, and the norm is of none of them.",
        ("go_back", "shard_all"),
    ),
    "batch_scale": Meaning(
        "The whole batch is scaled",
        "The typical token weighs far more in the loss than in the run's own steps before: no token stands out, the "
        "scale does. Look at the reward's range, at how advantages are normalized and at the loss's aggregation.",
        ("keep_rollouts", "mean_only", "skip", "clip"),
    ),
    "not_tokens": Meaning(
        "A gradient that is not the tokens'",
        "A part of the gradient comes through no token's log-prob or entropy, or is not their derivative: a router's "
        "auxiliary loss, a regularizer, a hook or a backward of somebody's own. The named parameters carry most of it.",
        ("skip", "not_compiled", "clip_layers"),
    ),
    "transient": Meaning(
        "A spike that did not come back",
        "Run again as they were, the same micro-batches gave a healthy gradient: hardware or a race made the spike, "
        "not the data.",
        ("skip", "rerun"),
    ),
    "unknown": Meaning(
        "No single factor stands out",
        "Every factor of the gradient is within three times what is typical in the batch: the spike is spread, or "
        "builds up from several factors.",
        ("more_culprits", "more_steps", "smaller_steps"),
    ),
}
"""By a cause's label."""


def meaning_of(label: str) -> Meaning:
    """What a cause means; of an unknown label, what is said when nothing stands out."""
    return MEANINGS.get(label, MEANINGS["unknown"])


def of_engine(culprit: Culprit) -> str:
    """What engine and trainer say of a token whose log-prob of the rollout is not its own."""
    if culprit.cause.label not in ("not_sampled", "shifted_log_probs"):
        return ""
    old = culprit.old_log_prob_stored
    before = "" if old in (None, culprit.rollout_log_prob) else f" {number(old, 3)} before the update and"
    said = f"the engine says log-prob {number(culprit.rollout_log_prob, 3)}"
    return f": {said}, the trainer{before} {number(culprit.log_prob, 3)} now"


def group(event: Event) -> str:
    """Why the largest culprit's advantage is none that the estimator gives for its group; empty where it may be."""
    culprit = leader(event.culprits) or Culprit()
    known = {name: value for name, value in culprit.cause.numbers.items() if value is not None}
    if "rollouts" not in known:
        return ""
    rollouts, advantage = int(known["rollouts"]), culprit.advantage or 0.0
    if known.get("group_size") == 1:
        drawn = f", though {rollouts} are drawn" if rollouts > 1 else ""
        return f"Its prompt has no other response in the batch{drawn}: nothing is subtracted from its reward."
    if known.get("group_spread", math.inf) <= _ROUNDING * abs(culprit.reward or 0.0):
        return f"All rewards of its group are {number(culprit.reward, 3)}, and then its advantage is 0."
    if "advantage_bound" in known and abs(advantage) > _SLACK * known["advantage_bound"]:
        most, name = number(known["advantage_bound"], 3), GROUPED.get(event.run.estimator or "", "its estimator")
        return f"{name} gives at most {most} with {rollouts} responses."
    mean, of_siblings = known.get("group_mean", 0.0), (sibling.advantage or 0.0 for sibling in culprit.siblings or ())
    if abs(mean) > _FROM_ZERO * statistics.fmean(map(abs, (advantage, *of_siblings))):
        return f"The advantages of its group have a mean of {number(mean, 3)}, not 0."
    return ""


def again(culprit: Culprit) -> str:
    """Whether the same token, never sampled, ended turns in other events, too; with a blank before it."""
    num_events = culprit.cause.numbers.get("events_ended") or 0
    return f" In {num_events:.0f} events by now, the same token ends a turn unsampled." if num_events > 1 else ""
