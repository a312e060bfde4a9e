# SPDX-License-Identifier: Apache-2.0
"""What each cause means, what its numbers say, and what people do about it. Pure, standard library only."""

import math
import statistics
from dataclasses import dataclass

from ..record import Culprit, Event
from .advice import OF_REWARDS, actions_of
from .causes import GROUPED
from .culprits import leader
from .numbers import number

_SLACK = 1.01
"""On what an estimator gives at most, for what it adds to the standard deviation and for rounding."""
_FROM_ZERO = 0.5
"""A group's mean advantage from this part of their mean size on is not 0; weights on unlikely tokens move it less."""
_ROUNDING = 1e-6
"""Of a reward: rewards that differ by less are equal."""


@dataclass(frozen=True)
class Meaning:
    """One cause."""

    title: str
    means: str
    actions: tuple[str, ...]
    """By name, the likeliest to help first."""

    def advice(self, trainer: str | None, strategy: str = "", is_distilled: bool = False) -> list[tuple[str, str]]:
        """Pairs of what to do and its config line, for a run of this trainer and a search by this strategy;
        ``is_distilled``: without what is about rewards."""
        more = "more_probes" if strategy == "bisect" else "more_steps"  # bisection alone counts probes
        names = [name for name in self.actions if not is_distilled or name not in OF_REWARDS]
        return actions_of([more if name == "more_steps" else name for name in names], trainer)


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
        "A few layers have most of the gradient; clipping the global norm then starves all the others.",
        ("clip_layers", "smaller_steps", "clip"),
    ),
    "large_jacobian": Meaning(
        "The model is extremely sensitive at a token",
        "The gradient of the token's log-prob alone is far larger than other tokens', before the loss weighs it.",
        ("mask", "clip", "smaller_steps", "warm_up", "fp32"),
    ),
    "extreme_advantage": Meaning(
        "The advantage is extreme",
        "The advantage of this token is far outside what the batch has, or all of the batch's have the reward's unit. "
        "The gradient is proportional to it.",
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
        "The entropy bonus has a far larger coefficient than the policy loss, and makes nearly all of the gradient.",
        ("no_entropy",),
    ),
    "is_weight": Meaning(
        "The weight of the rollout correction",
        "Trainer and rollout engine disagree about this token, and the correction multiplies its gradient.",
        ("truncate", "mean_weight", "veto"),
    ),
    "value_outlier": Meaning(
        "The value is far from the return",
        "The critic predicted something else than what came; its gradient is proportional to the difference.",
        ("mask_critic", "keep_rollouts", "bound_value", "critic_first", "clip_critic"),
    ),
    "teacher_gap": Meaning(
        "Student and teacher disagree about a token",
        "The teacher's log-prob of this token is far from the student's, and distillation's gradient grows with that.",
        ("mask", "clamp_teacher", "keep_rollouts"),
    ),
    "non_finite": Meaning(
        "A loss without a finite gradient",
        "A NaN or an infinity entered the loss at this token; verl skips such a step, and the next may have it again.",
        ("keep_rollouts", "kl_mse", "fp32"),
    ),
    "spurious_token": Meaning(
        "An unlikely token that was rewarded by accident",
        "The model was sure of another token, and the reward of the whole response pushes this one up (STAPO, arXiv "
        "2602.15620).",
        ("mask", "reweight", "less_tail", "keep_rollouts"),
    ),
    "not_sampled": Meaning(
        "The policy never sampled a token",
        "No sampling gives its log-prob: exactly 0, or far from the trainer's, which has not moved. A template or a "
        "tool loop appended the token, or the text was tokenized again.",
        ("mask", "veto", "keep_rollouts"),
    ),
    "shifted_log_probs": Meaning(
        "The rollout's log-probs are shifted by one",
        "Over the whole response, the engine's log-prob of a token is the trainer's of its neighbour.",
        ("mask", "veto", "keep_rollouts"),
    ),
    "non_finite_forward": Meaning(
        "A forward that is not finite, with finite weights",
        "The log-probs are NaN or infinite from a token on: an activation overflowed, or attention saw no key.",
        ("fp32_forward", "padded", "not_compiled", "keep_weights"),
    ),
    "non_finite_backward": Meaning(
        "A backward that is not finite, of a loss that is",
        "NaN or infinity first appears in the backward through the model: a gradient overflowed, or a kernel is wrong.",
        ("fp32_forward", "padded", "not_compiled", "keep_weights"),
    ),
    "non_finite_padding": Meaning(
        "Only padding is not finite",
        "NaN or infinity is outside of the response mask. The loss leaves it out of its sum, but zero times NaN is NaN "
        "in the backward.",
        ("plain_loss", "kl_mse", "keep_rollouts"),
    ),
    "non_finite_weights": Meaning(
        "Weights that are not finite",
        "The named parameters hold NaN or infinity. An earlier step, a checkpoint or the optimizer's state did it, no "
        "token of this step.",
        ("go_back", "fp32", "smaller_steps"),
    ),
    "replicas_differ": Meaning(
        "Replicas whose weights differ",
        "A rank skipped a step or loaded something else, or gradients are not summed over replicas. Each replica then "
        "trains a model of its own, and the norm is of none of them.",
        ("go_back", "shard_all"),
    ),
    "batch_scale": Meaning(
        "The whole batch is scaled",
        "The typical token weighs far more in the loss than in the run's earlier steps, and no token stands out. Look "
        "at the reward's range, at how advantages are normalized and at the loss's aggregation.",
        ("keep_rollouts", "mean_only", "skip", "clip"),
    ),
    "not_tokens": Meaning(
        "A gradient that is not the tokens'",
        "Part of the gradient comes through no token's log-prob or entropy: a router's auxiliary loss, a regularizer, "
        "a hook or a custom backward. The named parameters carry most of it.",
        ("skip", "not_compiled", "clip_layers"),
    ),
    "transient": Meaning(
        "A spike that did not come back",
        "The same micro-batches gave a healthy gradient when they were run again: hardware or a race made the spike.",
        ("skip", "rerun"),
    ),
    "unknown": Meaning(
        "No single factor stands out",
        "Every factor of the gradient is within three times its typical size: only their product is large.",
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
    engines = number(culprit.rollout_log_prob, 3)
    return f": the engine says log-prob {engines}, the trainer{before} {number(culprit.log_prob, 3)} now"


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
    """Whether the same token, never sampled, ended turns in other events, too."""
    num_events = culprit.cause.numbers.get("events_ended") or 0
    return f"In {num_events:.0f} events by now, the same token ends a turn unsampled." if num_events > 1 else ""
