# SPDX-License-Identifier: Apache-2.0
"""Decide what to do now: the first rule in the table of causes that an event satisfies. Pure."""

import math
import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..record import Culprit, Event
from ..record.columns import OF_A_TOKEN
from .advice import ACTIONS, CHECKPOINT, in_force, is_trl, options_of
from .causes import APART, NOTABLE, RULES, CauseInfo
from .culprits import group_sentence, repeat_sentence
from .cures import cure_text, healer, how_healed
from .documents import document_words
from .numbers import bounded, number
from .story import cause_of, first_place, odd_number, pronoun, step_cause
from .text import listed, one_line, uncapitalized

_NUMBERS = (
    *("norm_without_update", "norm_without_change", "coefficient_over_typical", "advantage_over_run"),
    "teacher_gap_over_run",
)
"""Numbers of a cause that the rules' sentences name."""


@dataclass(frozen=True)
class Evidence:
    """An event's facts in the form that the rules ask for."""

    event: Event
    actor: Mapping[str, Any] = field(default_factory=dict)
    """The run's ``actor_rollout_ref.actor`` from its bundle; empty where it has none."""

    @property
    def label(self) -> str:
        """Return the cause's label."""
        return cause_of(self.event)

    @property
    def first(self) -> Culprit:
        """Return the largest culprit; an empty one where there is none."""
        return self.event.leader or Culprit()

    def number(self, name: str) -> float | None:
        """Return one of the cause's numbers; None where it is not known."""
        return (step_cause(self.event) or self.first.cause).numbers.get(name)

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the prompt's other rollouts."""
        return [sibling.reward for sibling in self.first.siblings or () if sibling.reward is not None]

    @property
    def is_reward_odd(self) -> bool:
        """Return whether the reward is far from its siblings', relative to their range."""
        reward, others = self.first.reward, [reward for reward in self.rewards if math.isfinite(reward)]
        if reward is None or not math.isfinite(reward) or not others:
            return reward is not None and not math.isfinite(reward)
        return abs(reward - statistics.median(others)) > NOTABLE * max(max(others) - min(others), 1.0)

    @property
    def is_advantage_odd(self) -> bool:
        """Return whether the advantage is what makes the gradient large."""
        advantage = self.first.at("advantage")
        return self.label == "extreme_advantage" or (advantage is not None and not math.isfinite(advantage))

    @property
    def drift(self) -> float:
        """Return |change| of the trainer's log-prob since the rollout, nats; 0 where it is not known."""
        return _distance(self.first.at("log_prob"), self.first.at("old_log_prob"))

    @property
    def do_engines_differ(self) -> bool:
        """Return whether trainer and engine disagreed before the update by more than the policy has moved."""
        gap = _distance(self.first.at("rollout_log_prob"), self.first.at("old_log_prob"))
        return gap > APART and gap >= self.drift

    @property
    def loss_mode(self) -> str | None:
        """Return the name of the run's policy loss; None where it is not known."""
        loss = self.actor.get("policy_loss")
        return loss.get("loss_mode") if isinstance(loss, Mapping) else None

    def is_judged(self, verdict: str) -> bool:
        """Return whether the certificate has this verdict on culprits of a finite norm."""
        norm = self.event.trigger.grad_norm
        is_finite = norm is None or math.isfinite(norm)
        return bool(self.event.culprits) and is_finite and self.event.certificate.verdict == verdict

    def as_text(self) -> dict[str, str]:
        """Return the texts that fill the rules' sentences, by name: a token's numbers by their columns, and others."""
        event, first, other, certificate = self.event, self.first, step_cause(self.event), self.event.certificate
        rewards = [number(reward, 3) for reward in self.rewards]
        names = [one_line(name, 60) for name in other.names[:3]] if other else []
        pull, pulled = "advantage", f"Advantage ({number(first.at('advantage'), 3)})"
        if event.is_supervised:
            pull, pulled = "loss weight", f"Loss weight ({number(first.at('loss_weight'), 3)})"
        elif event.is_distilled:
            pull, pulled = "distance from the teacher", f"The teacher's ({number(first.at('teacher_log_prob'), 3)})"
        probability = None if (log_prob := first.at("log_prob")) is None else math.exp(min(log_prob, 0.0))
        numbers = {name: first.at(name) for name in OF_A_TOKEN} | {name: self.number(name) for name in _NUMBERS}
        numbers["entropy_over_policy"] = self.number("entropy_over_log_prob") or self.number("entropy_term_over_policy")
        numbers |= {"reward": first.reward, "threshold": certificate.threshold}
        return {name: number(value, 3) for name, value in numbers.items()} | {
            "names": ", ".join(names) or "the batch's tensors",
            "rewards": listed(rewards[:6]) + (" and others" if len(rewards) > 6 else ""),
            "odd": odd_number(first) or "far from typical",
            "again": repeat_sentence(first),
            "document": document_words(first) or "Nothing else is known of it.",
            "group": group_sentence(event),
            "first": first_place(event),
            "neighbour": "next" if (self.number("shift") or 0.0) > 0 else "previous",
            "probability": number(probability, 2),
            "after": bounded(certificate.norm_after, certificate.error_bound, 3)[0],
            "more": number(event.search.num_more),
            "since": str(event.fault.step) if event.fault and event.fault.step is not None else "this one",
            "reason": certificate.reason or "the bound on the norm is too wide",
            "it": pronoun(event),
            "loss": str(self.loss_mode),
            "pull": pull,
            "Pull": pulled,
        }


def _distance(one: float | None, other: float | None) -> float:
    if one is None or other is None or not math.isfinite(one - other):
        return 0.0
    return abs(one - other)


FACTS: dict[str, Callable[[Evidence], bool]] = {
    "rehearsal": lambda at: at.event.trigger.kind == "forced",
    "nan_on_padding": lambda at: at.loss_mode in ("clip_cov", "kl_cov"),  # where a log-ratio overflows there
    "scaled_advantages": lambda at: (at.number("advantage_over_run") or 0.0) >= NOTABLE,
    "scaled_gap": lambda at: (at.number("teacher_gap_over_run") or 0.0) >= NOTABLE,
    "undecided": lambda at: at.is_judged("undecided"),
    "not_explained": lambda at: at.is_judged("not_explained"),
    "exhausted": lambda at: at.event.search.status == "budget_exhausted",
    "more_left": lambda at: bool(at.event.search.num_more),
    "culprits": lambda at: bool(at.event.culprits),
    "not_rerun": lambda at: at.event.rerun is None,
    "odd_advantage": lambda at: at.is_advantage_odd,
    "odd_group": lambda at: bool(group_sentence(at.event)),
    "odd_reward": lambda at: at.is_reward_odd,
    "siblings": lambda at: bool(at.rewards),
    "teacher_not_finite": lambda at: not math.isfinite(at.first.at("teacher_log_prob") or 0.0),
    "engines_differ": lambda at: at.do_engines_differ,
    "first_update": lambda at: at.event.step.mini_batch == at.event.step.epoch == 0 and at.drift > APART,
    "distilled": lambda at: at.event.is_distilled,
    "punished": lambda at: (at.first.at("advantage") or 0.0) < 0,
}
"""Conditions that a rule may name besides a cause."""


@dataclass(frozen=True)
class NextStep:
    """The advice for an event."""

    do: str
    lines: dict[str, str]
    """The config line, by version of verl where lines differ."""
    why: str
    check: str
    """The check that would confirm the advice."""
    meanwhile: dict[str, str] = field(default_factory=dict)
    """A stopgap: its config line, by its sentence."""


def rule_for(evidence: Evidence) -> CauseInfo:
    """Return the first rule that the evidence satisfies."""
    return next(
        rule
        for rule in RULES
        if {evidence.label, "any"} & {*rule.causes} and all(FACTS[name](evidence) for name in rule.when)
    )


def next_step(event: Event, actor: Mapping[str, Any] | None = None) -> NextStep | None:
    """Return the advice; None where the run's ``actor_rollout_ref.actor`` has all of it already."""
    evidence = Evidence(event, actor or {})
    rule, text = rule_for(evidence), evidence.as_text()
    for name in rule.do:
        lines = _lines(name, evidence)
        if lines:
            do = rule.say if name == rule.do[0] and rule.say else ACTIONS[name].do
            if name == "mask" and name != rule.do[0]:  # the run does already what goes to the root
                do = f"Until the cause is fixed, {uncapitalized(ACTIONS[name].do)}"
            do, why, check = (sentence.format_map(text).rstrip() for sentence in (do, rule.why, rule.check))
            return _with_cure(NextStep(do, lines, why, check), evidence, has_own_words=bool(rule.say))
    return _with_cure(None, evidence)


def _with_cure(found: NextStep | None, evidence: Evidence, has_own_words: bool = False) -> NextStep | None:
    """Put the cure that heals the step first, then the root cause to look into, and ``mask`` as a stopgap."""
    event, cured = evidence.event, healer(evidence.event)
    if cured is None:
        return found
    lines, why, check = {"": cured.line}, "", "No further event has this cause."
    if not event.culprits:
        why, check = (
            "No few tokens make this spike; a setting for all of them heals it.",
            "The norm stays below the threshold.",
        )
    elif found is not None:
        why, check = f"{found.why} {found.do}" if has_own_words else found.why, found.check
    stopgap = [*_lines("mask", evidence).values()] if event.certificate.verdict == "explained" else []
    meanwhile = {f"As a stopgap, {uncapitalized(ACTIONS['mask'].do)}": line for line in stopgap[:1]}
    return NextStep(f"{cure_text(cured)} {how_healed(event, cured)}", lines, why, check, meanwhile)


def _lines(name: str, evidence: Evidence) -> dict[str, str]:
    """Return an action's config lines; empty where the run has it already or it cannot help."""
    event = evidence.event
    trainer, requested = event.run.trainer, event.action.requested
    if name in (requested, f"{requested}_critic") or (event.is_distilled and ACTIONS[name].is_of_rewards):
        return {}
    if name == "mean_only" and event.run.estimator not in (None, "grpo"):  # which divides by nothing
        return {}
    if name == "kl_mse" and evidence.actor.get("use_kl_loss") is False:
        return {}
    if name == "more_steps" and event.search.strategy == "bisect":
        name = "more_probes"
    options = options_of(name, trainer)
    checkpoint = event.consequence.last_checkpoint if event.consequence else None
    if name == "go_back" and checkpoint:
        if is_trl(trainer):
            return {"": f"trainer.train(resume_from_checkpoint={one_line(checkpoint)!r})"}
        path = shlex.quote(one_line(checkpoint))
        return {label: option.line.replace(CHECKPOINT, path) for label, option in options.items()}
    return {label: option.line for label, option in options.items() if not in_force(option.settings, evidence.actor)}
