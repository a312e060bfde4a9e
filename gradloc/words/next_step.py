# SPDX-License-Identifier: Apache-2.0
"""What to do now, decided from an event's evidence: the first rule of the table of causes that holds. Pure."""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..record import Event
from .advice import ACTIONS, CHECKPOINT, in_force, is_trl, lines_of
from .causes import APART, NOTABLE
from .culprits import group
from .cures import healer, how_healed
from .evidence import Evidence
from .meanings import RULES, Meaning
from .text import one_line


@dataclass(frozen=True)
class NextStep:
    """One thing to do."""

    do: str
    lines: dict[str, str]
    """The config line, under the name of the verl that it is for where that matters."""
    why: str
    check: str
    """What would show that it was right."""
    meanwhile: dict[str, str] = field(default_factory=dict)
    """A stopgap: its config line, under what it does."""


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
    "odd_group": lambda at: bool(group(at.event)),
    "odd_reward": lambda at: at.is_reward_odd,
    "siblings": lambda at: bool(at.rewards),
    "teacher_not_finite": lambda at: not math.isfinite(at.first.teacher_log_prob or 0.0),
    "engines_differ": lambda at: at.do_engines_differ,
    "first_update": lambda at: at.event.step.mini_batch == at.event.step.epoch == 0 and at.drift > APART,
    "distilled": lambda at: at.event.is_distilled,
    "punished": lambda at: (at.first.advantage or 0.0) < 0,
}
"""What a rule may ask of an event beside its cause."""


def rule_for(evidence: Evidence) -> Meaning:
    """The first rule that holds."""
    return next(
        rule
        for rule in RULES
        if {evidence.label, "any"} & {*rule.causes} and all(FACTS[name](evidence) for name in rule.when)
    )


def next_step(event: Event, actor: Mapping[str, Any] | None = None) -> NextStep | None:
    """The one thing to do; None where the run does all there is, as its ``actor_rollout_ref.actor`` says."""
    evidence = Evidence(event, actor or {})
    rule, text = rule_for(evidence), evidence.as_text()
    for name in rule.do:
        lines = _lines(name, evidence)
        if lines:
            do = rule.say if name == rule.do[0] and rule.say else ACTIONS[name].do
            do, why, check = (sentence.format_map(text).rstrip() for sentence in (do, rule.why, rule.check))
            return _with_cure(NextStep(do, lines, why, check), evidence, has_own_words=bool(rule.say))
    return _with_cure(None, evidence)


def _with_cure(found: NextStep | None, evidence: Evidence, has_own_words: bool = False) -> NextStep | None:
    """Led by the setting that was measured to heal the step; then the root cause to look into, and ``mask``."""
    event, cured = evidence.event, healer(evidence.event)
    if cured is None:
        return found
    lines, why, check = {"": cured.line}, "", "No further event has this cause."
    if found is not None:
        why, check = f"{found.why} {found.do}" if has_own_words else found.why, found.check
    stopgap = [*_lines("mask", evidence).values()] if event.certificate.verdict == "explained" else []
    meanwhile = {f"As a stopgap: {ACTIONS['mask'].do.lower()}": line for line in stopgap[:1]}
    return NextStep(f"{ACTIONS[cured.name].do} {how_healed(event, cured)}", lines, why, check, meanwhile)


def _lines(name: str, evidence: Evidence) -> dict[str, str]:
    """An action's config lines; empty where the run has it already, or where it cannot help."""
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
    lines = lines_of(name, trainer)
    checkpoint = event.consequence.last_checkpoint if event.consequence else None
    if name == "go_back" and checkpoint:
        if is_trl(trainer):
            return {"": f"trainer.train(resume_from_checkpoint={one_line(checkpoint)!r})"}
        path = shlex.quote(one_line(checkpoint))
        return {label: line.replace(CHECKPOINT, path) for label, line in lines.items()}
    return {label: line for label, line in lines.items() if not in_force(line, evidence.actor)}
