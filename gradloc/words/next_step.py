# SPDX-License-Identifier: Apache-2.0
"""What to do now, decided from an event's evidence: the first rule of a table that holds. The docs print the table.

A rule says why it follows and what would show that it was right. Pure, standard library only.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..record import Event
from .advice import ACTIONS, CHECKPOINT, OF_REWARDS, in_force, is_trl, lines_of
from .causes import APART, NOTABLE
from .evidence import Evidence
from .meanings import group
from .text import one_line

_NAN_ON_PADDING = ("clip_cov", "kl_cov")
"""verl's policy losses whose gradient is NaN where a log-ratio outside of the mask overflows."""


@dataclass(frozen=True)
class NextStep:
    """One thing to do."""

    do: str
    lines: dict[str, str]
    """The config line, under the name of the verl that it is for where that matters."""
    why: str
    check: str
    """What would show that it was right."""


@dataclass(frozen=True)
class Rule:
    """What to do where something is seen."""

    seen: str
    """What, as the docs say it."""
    holds: Callable[[Evidence], bool]
    actions: tuple[str, ...]
    """By name; the first that the run's verl has a line for and that is not in force."""
    why: str
    """With the names of :meth:`Evidence.as_text`, as ``do``."""
    check: str
    do: str = ""
    """In place of the first action's own sentence."""


def _is(*labels: str) -> Callable[[Evidence], bool]:
    return lambda at: at.label in labels


RULES = (
    Rule(
        "A rehearsal: the step was asked for",
        lambda at: at.event.trigger.kind == "forced",
        ("no_rehearsal",),
        "Nothing spiked: trigger.force_step asked for this step.",
        "The next event is a real spike.",
    ),
    Rule(
        "Weights that are not finite",
        _is("non_finite_weights"),
        ("go_back", "fp32"),
        "The weights were not finite before any forward, so no token of this step is at fault.",
        "The first step after resuming has a finite norm.",
        "Resume from the newest checkpoint before it; if that is not finite either, from an earlier one.",
    ),
    Rule(
        "Replicas whose weights differ",
        _is("replicas_differ"),
        ("go_back", "shard_all"),
        "The weights of {names} differ between replicas, so no token of this step is at fault.",
        "After resuming, the second step says nothing of replicas.",
        "Load one checkpoint on all ranks, and look for the rank that skipped a step.",
    ),
    Rule(
        "NaN on padding, under a loss that gives NaN there",
        lambda at: at.label == "non_finite_padding" and at.loss_mode in _NAN_ON_PADDING,
        ("plain_loss",),
        "Only positions outside of the response mask are not finite; {loss} gives NaN there if a log-ratio overflows.",
        "All further norms are finite.",
    ),
    Rule(
        "NaN on padding",
        _is("non_finite_padding"),
        ("keep_rollouts",),
        "Only positions outside of the response mask are not finite, in {names}: zero times NaN is NaN.",
        "With zeros there, the replayed norm is {after}.",
        "Write zeros outside of the response mask, where your code fills {names}. Meanwhile save the rollouts.",
    ),
    Rule(
        "It did not come back when run again (hardware)",
        _is("transient"),
        ("skip",),
        "The same micro-batches gave a healthy gradient when they were run again: it was not the data.",
        "It comes again on the same machine, and not on others.",
        "Note which machine it was, and test it. Meanwhile skip such steps.",
    ),
    Rule(
        "A gradient that is not the tokens'",
        _is("not_tokens"),
        ("skip", "not_compiled"),
        "The tokens' own part is healthy; the rest is in {names}.",
        "Without what you find there, the tokens' norm is the step's.",
        "Look for what adds to or scales the gradient of {names}: a router's loss, a hook. Meanwhile skip such steps.",
    ),
    Rule(
        "The whole batch is scaled, and so are its advantages",
        lambda at: at.label == "batch_scale" and (at.number("advantage_over_run") or 0.0) >= NOTABLE,
        ("mean_only", "keep_rollouts", "skip"),
        "No token stands out: the advantages are {over_run} times the run's usual.",
        "The advantages are back at their usual size.",
    ),
    Rule(
        "The whole batch is scaled, and so is its distance from the teacher",
        lambda at: at.label == "batch_scale" and (at.number("teacher_gap_over_run") or 0.0) >= NOTABLE,
        ("clamp_teacher", "skip", "clip"),
        "No token stands out: student and teacher are {over_run} times as far apart as usual.",
        "actor/distillation/abs_loss is back at its usual size.",
    ),
    Rule(
        "The whole batch is scaled, but not its advantages",
        _is("batch_scale"),
        ("skip", "clip"),
        "No token stands out: the typical token weighs {scale} times as much as usual, and not by its {pull}.",
        "The typical token weighs as much as before.",
        "Look at what scales the loss: loss_agg_mode, the ratios. Meanwhile skip such steps.",
    ),
    Rule(
        "The entropy term",
        _is("entropy_term"),
        ("no_entropy",),
        "The entropy bonus pulls {entropy} times as hard as the policy term.",
        "No further spike has this cause; entropy stays where it was.",
    ),
    Rule(
        "The KL term",
        _is("kl_term"),
        ("kl_mse", "less_kl"),
        "The KL penalty makes most of the gradient; its estimator grows with the exponential of the log-ratio.",
        "No further spike has this cause, and the KL stays where it was.",
    ),
    Rule(
        "The forward is not finite, though the weights are",
        _is("non_finite_forward"),
        ("fp32_forward", "padded"),
        "The log-prob is not finite, before any loss: an activation overflowed, or attention saw no key. {first}",
        "The same step, replayed in fp32, is finite.",
    ),
    Rule(
        "The backward is not finite, though the loss's derivative is",
        _is("non_finite_backward"),
        ("fp32_forward", "padded"),
        "Log-probs and advantages are finite, and so is the gradient that the loss gives to the model. {first}",
        "The same step, replayed in fp32, is finite.",
    ),
    Rule(
        "The critic's value is far from the return",
        _is("value_outlier"),
        ("bound_value", "mask_critic", "clip_critic"),
        "The critic said {value}, the return is {target}.",
        "The value loss falls again, and the critic has no further spike.",
    ),
    Rule(
        "Student and teacher disagree about the token",
        _is("teacher_gap"),
        ("clamp_teacher", "mask", "keep_rollouts"),
        "The teacher's log-prob is {teacher}, the student's {now} now.",
        "actor/distillation/abs_loss falls, and no further event has this cause.",
    ),
    Rule(
        "Undecided, since the search ran out",
        lambda at: at.is_judged("undecided") and at.event.search.status == "budget_exhausted",
        ("more_steps",),
        "The norm without {it} is not known well enough to blame {it}: {reason}.",
        "The next event is explained. This one alone needs nothing.",
    ),
    Rule(
        "More culprits than may be named",
        lambda at: at.is_judged("not_explained") and bool(at.event.search.num_more),
        ("more_culprits",),
        "At least {more} more are left beyond those that search.max_culprits allows.",
        "The next event is explained.",
    ),
    Rule(
        "The rest still spikes",
        lambda at: at.is_judged("not_explained"),
        ("more_steps", "rerun", "skip"),
        "Without {it} the norm is {after}, still over the threshold of {threshold}: something else spikes, too.",
        "The next event is explained, or names what else.",
    ),
    Rule(
        "The policy never sampled the token",
        _is("not_sampled"),
        ("mask", "keep_rollouts"),
        "The engine says log-prob {written}, the trainer {now} now: a template or tool appended it, or it was "
        "retokenized. {again}",
        "Such tokens have 0 in response_mask, and no further event names one.",
        "Set response_mask to 0 for what the model did not sample. Until then, take such steps without the culprits.",
    ),
    Rule(
        "The rollout's log-probs are shifted by one",
        _is("shifted_log_probs"),
        ("mask", "keep_rollouts"),
        "Over the response, the engine's log-prob of a token is the trainer's of the {neighbour} one.",
        "The engine's log-probs agree with the trainer's, and no further event has this cause.",
        "Move them by one where rollout_log_probs is filled. Until then, take such steps without the culprits.",
    ),
    Rule(
        "The advantage is more than its estimator gives, or its group is odd",
        lambda at: at.is_advantage_odd and bool(group(at.event)),
        ("mean_only", "mask", "keep_rollouts"),
        "Its advantage is {advantage}. {group} What computes the advantage or its groups is at fault, not the token.",
        "No advantage is above what the estimator gives, and no further event has this cause.",
        "Look at what computes the advantage, and at the uids that make its groups. First rule the division out.",
    ),
    Rule(
        "The reward is odd against its siblings'",
        lambda at: at.label in ("extreme_advantage", "non_finite") and at.is_reward_odd,
        ("keep_rollouts",),
        "Its reward is {reward}; the other rollouts of the prompt have {rewards}.",
        "With the reward function fixed, this response's reward is like its siblings'.",
        "Fix the reward function for such a response. Save the rollouts, to find others.",
    ),
    Rule(
        "The advantage is odd though the reward is not (the estimator)",
        lambda at: at.is_advantage_odd and bool(at.rewards),
        ("mean_only", "mask", "keep_rollouts"),
        "Its reward of {reward} is like its siblings' ({rewards}), its advantage is {advantage}. What computes the "
        "advantage is at fault, not the reward.",
        "Advantages stay within a few times the rewards' differences.",
        "Look at what computes the advantage: its normalization, or your own code. First rule the division out.",
    ),
    Rule(
        "The advantage is odd, and nothing is known of its siblings",
        lambda at: at.is_advantage_odd,
        ("keep_rollouts", "mask"),
        "The advantage is {advantage}, {odd}; no other rollout of the prompt is recorded.",
        "The saved rollout shows whether its reward is as large.",
    ),
    Rule(
        "The teacher's log-prob is not finite",
        lambda at: at.label == "non_finite" and not math.isfinite(at.first.teacher_log_prob or 0.0),
        ("keep_rollouts", "mask"),
        "The teacher's log-prob of this token is {teacher}.",
        "All further norms are finite.",
        "Look at what the teacher's server answers for such a response. Save the rollouts, to ask it again.",
    ),
    Rule(
        "A loss without a finite gradient, from a finite advantage",
        _is("non_finite"),
        ("kl_mse", "dual_clip", "fp32"),
        "{Pull} and log-prob ({now}) are finite, the gradient is not: an exponential overflows.",
        "All further norms are finite.",
    ),
    Rule(
        "The weight of the rollout correction",
        _is("is_weight"),
        ("truncate", "veto"),
        "The correction multiplies this token by {weight}.",
        "No token's weight is above the truncation.",
    ),
    Rule(
        "The ratio: trainer and rollout engine disagree",
        lambda at: at.is_ratio and at.do_engines_differ,
        ("weigh_tokens", "veto", "eager"),
        "The engine that wrote it says log-prob {written}, the trainer said {old} before the update: the two "
        "disagree, the policy did not move.",
        "rollout_corr/kl falls, and the ratios with it.",
    ),
    Rule(
        "The ratio, at the step's first update",
        lambda at: at.is_ratio and at.event.step.mini_batch == at.event.step.epoch == 0 and at.drift > APART,
        ("log_probs", "weigh_tokens", "mask"),
        "Nothing was updated yet in this step, so now ({now}) and old ({old}) should agree: the old one is off.",
        "The ratio at the first mini-batch of each step is 1.",
        "Find where the old log-probs come from: another precision, an older policy. Record the engine's beside them.",
    ),
    Rule(
        "The ratio: the policy has moved (staleness)",
        lambda at: at.is_ratio,
        ("one_epoch", "clip_tokens", "dual_clip", "mask"),
        "The log-prob went from {old} to {now} within the step: ratio {ratio}.",
        "actor/ppo_kl falls, and no further event has this cause.",
    ),
    Rule(
        "Low probability, under distillation",
        lambda at: at.label == "low_probability" and at.event.is_distilled,
        ("less_tail", "clamp_teacher", "mask"),
        "Its probability is {probability}: unlikely tokens have the largest gradients.",
        "Events with a low probability become rare.",
    ),
    Rule(
        "Low probability and a negative advantage",
        lambda at: at.label == "low_probability" and (at.first.advantage or 0.0) < 0,
        ("reweight", "lopti", "less_tail"),
        "Its probability is {probability}, its advantage {advantage}: pushing an unlikely token down moves the most.",
        "Events with a low probability become rare; the entropy stays.",
    ),
    Rule(
        "Low probability, rewarded",
        _is("low_probability", "spurious_token"),
        ("reweight", "less_tail", "mask"),
        "Its probability is {probability}, and the reward of the whole response pushes it up (advantage {advantage}).",
        "Events with a low probability become rare; the reward goes on rising.",
    ),
    Rule(
        "Some layers explode while others stay calm",
        _is("layer_heterogeneity"),
        ("clip_layers", "smaller_steps", "clip"),
        "A few layers carry the norm, and clipping the whole starves the others.",
        "The layers' norms are within a few times their own medians.",
    ),
    Rule(
        "The model is extremely sensitive there",
        _is("large_jacobian"),
        ("mask", "smaller_steps", "clip"),
        "Neither {pull} nor ratio is odd: the gradient of the log-prob alone is {odd}.",
        "No further event has this cause.",
    ),
    Rule(
        "No single factor stands out",
        lambda at: bool(at.event.culprits),
        ("mask", "smaller_steps", "clip"),
        "Every factor is within three times its typical size; only their product is large.",
        "The steps without them go on as before.",
    ),
    Rule(
        "Nothing found: the search ran out",
        lambda at: at.event.search.status == "budget_exhausted",
        ("more_steps",),
        "The search reached its limit before it had looked everywhere.",
        "The next event has culprits.",
    ),
    Rule(
        "Nothing found, and not run again",
        lambda at: at.event.rerun is None,
        ("rerun", "skip"),
        "A spike that no token made and that does not come back is hardware or a race.",
        "The next event says whether it came back.",
    ),
    Rule(
        "Nothing found, and it came back",
        lambda at: True,
        ("skip", "smaller_steps"),
        "The spike is in the data or the weights, and no few tokens explain it.",
        "The run goes on without these steps.",
    ),
)
"""In the order in which they are asked."""


def next_step(event: Event, actor: Mapping[str, Any] | None = None) -> NextStep | None:
    """The one thing to do; None where the run does all there is, as its ``actor_rollout_ref.actor`` says."""
    evidence = Evidence(event, actor or {})
    rule = next(rule for rule in RULES if rule.holds(evidence))
    text = evidence.as_text()
    for name in rule.actions:
        lines = _lines(name, evidence)
        if lines:
            do = rule.do if name == rule.actions[0] and rule.do else ACTIONS[name].do
            do, why, check = (sentence.format_map(text).rstrip() for sentence in (do, rule.why, rule.check))
            return NextStep(do, lines, why, check)
    return None


def _lines(name: str, evidence: Evidence) -> dict[str, str]:
    """An action's config lines; empty where the run has it already, or where it cannot help."""
    event = evidence.event
    trainer, requested = event.run.trainer, event.action.requested
    if name in (requested, f"{requested}_critic") or (event.is_distilled and name in OF_REWARDS):
        return {}
    if name == "mean_only" and event.run.estimator not in (None, "grpo"):  # which divides by nothing
        return {}
    if name == "kl_mse" and evidence.actor.get("use_kl_loss") is False:
        return {}
    if name == "more_steps" and event.search.strategy == "bisect":
        name = "more_probes"
    lines = lines_of(name, trainer)
    checkpoint = event.consequence.last_checkpoint if event.consequence else None
    if name == "go_back" and checkpoint:
        if is_trl(trainer):
            return {"": f"trainer.train(resume_from_checkpoint={one_line(checkpoint)!r})"}
        path = shlex.quote(one_line(checkpoint))
        return {label: line.replace(CHECKPOINT, path) for label, line in lines.items()}
    return {label: line for label, line in lines.items() if not in_force(line, evidence.actor)}
