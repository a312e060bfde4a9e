# SPDX-License-Identifier: Apache-2.0
"""What to do now follows from the evidence, rule by rule."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradloc.record import Action, Consequence, Event
from gradloc.words.evidence import Evidence
from gradloc.words.meanings import MEANINGS
from gradloc.words.next_step import RULES, next_step
from gradloc.words.story import lede
from tests import words
from tests.report.builder import make_culprit

DOCS = Path(__file__).resolve().parents[2] / "docs" / "advice.md"
MADE_BY = {"project": "a", "experiment": "b", "trainer": "verl 0.7.0"}


def sibling(reward: float) -> dict:
    return {"row": 1, "sequence_id": "u:2", "reward": reward, "advantage": 0.8, "num_tokens": 9}


def event(culprit: dict | None = None, label: str = "", run: dict = MADE_BY, **changes) -> Event:
    culprits = [make_culprit(**(culprit or {}))]
    if label:
        culprits[0]["cause"] = {"label": label, "numbers": {"advantage_over_typical": 9.0}}
    return words.event(**{"culprits": culprits, "run": run, **changes})


def beside(label: str, **numbers: float) -> Event:
    cause = {"label": label, "reason": "so it is", "numbers": numbers, "names": ["a.weight"], "places": []}
    return event(culprits=[], cause=cause)


def certified(verdict: str, **search) -> Event:
    return event(certificate={"verdict": verdict, "reason": "of the bound"}, search=search)


def missed(**search) -> Event:
    return event(culprits=[], search={"status": "not_found", **search})


MOVED = {"log_prob": -1.0, "old_log_prob_used": -6.0, "old_log_prob_stored": -6.0, "rollout_log_prob": -6.0}
TAUGHT = {"log_prob": -9.0, "teacher_log_prob": -0.1, "advantage": None}
DISTILLED = {"teacher_gap": 0.1}
SEEN = {
    "A rehearsal: the step was asked for": event(trigger={"kind": "forced"}),
    "Weights that are not finite": beside("non_finite_weights", parameters=2),
    "Replicas whose weights differ": beside("replicas_differ", parameters=2),
    "NaN on padding": beside("non_finite_padding"),
    "It did not come back when run again (hardware)": beside("transient"),
    "A gradient that is not the tokens'": beside("not_tokens"),
    "The whole batch is scaled, and so are its advantages": beside("batch_scale", advantage_over_run=1e4),
    "The whole batch is scaled, and so is its distance from the teacher": beside(
        "batch_scale", teacher_gap_over_run=1e4
    ),
    "The whole batch is scaled, but not its advantages": beside("batch_scale", advantage_over_run=1.1),
    "The entropy term": beside("entropy_term", entropy_term_over_policy=61.3),
    "The KL term": event(label="kl_term"),
    "The forward is not finite, though the weights are": event(label="non_finite_forward"),
    "The backward is not finite, though the loss's derivative is": event(
        label="non_finite_backward",
        first_not_finite={"module": "model.norm", "way": "backward", "before": {"lm_head": 3e38}},
    ),
    "The critic's value is far from the return": event(label="value_outlier", model="critic"),
    "Student and teacher disagree about the token": event(TAUGHT, "teacher_gap"),
    "Undecided, since the search ran out": certified("undecided", status="budget_exhausted"),
    "More culprits than may be named": certified("not_explained", num_more=3),
    "The rest still spikes": certified("not_explained"),
    "The policy never sampled the token": event({"rollout_log_prob": 0.0, "log_prob": -12.0}, "not_sampled"),
    "The rollout's log-probs are shifted by one": event(label="shifted_log_probs"),
    "The advantage is more than its estimator gives, or its group is odd": event(
        {
            "siblings": [sibling(1.0), sibling(0.0)],
            "cause": {"label": "extreme_advantage", "numbers": {"rollouts": 3, "advantage_bound": 1.155}},
        },
        run=MADE_BY | {"estimator": "grpo", "rollouts": 3},
    ),
    "The reward is odd against its siblings'": event({"reward": 90.0, "siblings": [sibling(1.0), sibling(0.0)]}),
    "The advantage is odd though the reward is not (the estimator)": event({"siblings": [sibling(1.0), sibling(0.0)]}),
    "The advantage is odd, and nothing is known of its siblings": event(),
    "The teacher's log-prob is not finite": event({"teacher_log_prob": float("nan")}, "non_finite"),
    "A loss without a finite gradient, from a finite advantage": event(label="non_finite"),
    "The weight of the rollout correction": event({"is_weight": 40.0}, "is_weight"),
    "The ratio: trainer and rollout engine disagree": event(
        {"log_prob": -6.1, "old_log_prob_used": -1.0, "old_log_prob_stored": -6.0, "rollout_log_prob": -1.5},
        "token_mismatch",
    ),
    "The ratio, at the step's first update": event(MOVED, "token_mismatch"),
    "The ratio: the policy has moved (staleness)": event(MOVED, "token_mismatch", step={"mini_batch": 1}),
    "Low probability, under distillation": event(TAUGHT, "low_probability", batch=DISTILLED),
    "Low probability and a negative advantage": event({"advantage": -1.0, "log_prob": -9.0}, "low_probability"),
    "Low probability, rewarded": event({"log_prob": -9.0}, "spurious_token"),
    "Some layers explode while others stay calm": event(label="layer_heterogeneity"),
    "The model is extremely sensitive there": event(label="large_jacobian"),
    "No single factor stands out": event(label="unknown"),
    "Nothing found: the search ran out": missed(status="budget_exhausted"),
    "Nothing found, and not run again": missed(),
    "Nothing found, and it came back": event(
        culprits=[], rerun={"norm": 1.0, "difference": 0.0, "is_reproduced": True}
    ),
}


@pytest.mark.parametrize("seen", SEEN)
def test_each_evidence_has_its_step_with_why_and_what_would_show_it(seen):
    found = SEEN[seen]
    rule = next(rule for rule in RULES if rule.holds(Evidence(found)))
    assert rule.seen == seen
    step = next_step(found)
    assert step.lines and step.do.endswith((".", ":")) and step.why.endswith(".") and step.check.endswith(".")
    assert not re.search(r"[{}]|\bNone\b|\bnan\b", f"{step.do} {step.why} {step.check}")


def test_every_rule_is_seen_here_or_needs_the_run_s_config():
    assert [rule.seen for rule in RULES if rule.seen not in SEEN] == [
        "NaN on padding, under a loss that gives NaN there"
    ]
    step = next_step(SEEN["NaN on padding"], {"policy_loss": {"loss_mode": "clip_cov"}})
    assert (
        step.lines == {"": "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"} and "clip_cov gives NaN" in step.why
    )


def test_a_run_without_a_kl_loss_is_not_told_to_change_its_estimator():
    found = SEEN["A loss without a finite gradient, from a finite advantage"]
    assert next_step(found).lines == {"": "actor_rollout_ref.actor.kl_loss_type=mse"}
    assert next_step(found, {"use_kl_loss": False}).lines == {"": "actor_rollout_ref.actor.clip_ratio_c=2.0"}


def test_a_distilled_run_is_not_told_of_rewards():
    found = event(TAUGHT, "large_jacobian", batch=DISTILLED)
    assert next_step(found).why.startswith("Neither distance from the teacher nor ratio is odd")
    moved = event({**TAUGHT, **MOVED}, "token_mismatch", step={"mini_batch": 1}, batch=DISTILLED)
    assert next_step(moved).lines == {"": "actor_rollout_ref.actor.ppo_epochs=1"}
    once = next_step(moved, {"ppo_epochs": 1})
    assert once.lines == {"": "actor_rollout_ref.actor.gradloc.action.mode=mask"}, "its ratio has clips of its own"
    told = [line for _, line in MEANINGS["low_probability"].advice("verl 0.9.1", is_distilled=True)]
    assert len(told) == 3 and not any("reweighting" in line or "lopti" in line for line in told)


def test_a_probability_is_said_as_it_was():
    assert "Its probability is 0.00012, " in next_step(SEEN["Low probability and a negative advantage"]).why


def test_undecided_after_a_whole_search_the_cause_says_what_to_do():
    assert (
        next_step(certified("undecided"))
        == next_step(certified("explained"))
        != next_step(SEEN["Undecided, since the search ran out"])
    )


def test_the_reward_is_accused_only_where_it_is_odd():
    odd, plain = (
        SEEN[seen] for seen in SEEN if "reward is" in seen and "siblings" in seen or "(the estimator)" in seen
    )
    assert "Its reward is 90; the other rollouts of the prompt have 1 and 0." == next_step(odd).why
    why = "Its reward of 1 is like its siblings' (1 and 0), its advantage is 10,000. "
    assert next_step(plain).why == f"{why}What computes the advantage is at fault, not the reward."


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_where_it_first_is_not_finite_is_said_with_what_was_there_before(way):
    first = {"module": "model.norm", "way": way, "before": {"a.up": 61.0, "a.down": 3e38}}
    found = event(label=f"non_finite_{way}", first_not_finite=first)
    what = {"forward": "the output", "backward": "the gradient of the output"}[way]
    said = f"It first appears in {what} of model.norm; the largest values right before it: a.down 3e38, a.up 61."
    assert said in next_step(found).why and said in lede(found)
    assert "first appears" not in lede(event(label=f"non_finite_{way}"))


def test_an_estimator_is_accused_with_its_bound_and_not_told_to_drop_a_division_that_it_lacks():
    found = SEEN["The advantage is more than its estimator gives, or its group is odd"]
    step = next_step(found)
    assert "Its advantage is 10,000. GRPO gives at most 1.16 with 3 responses." in step.why
    assert step.lines == {"": "algorithm.norm_adv_by_std_in_grpo=false"}
    without = next_step(replace(found, run=replace(found.run, estimator="grpo_mean")))
    assert "GRPO without the division gives at most" in without.why
    assert without.lines == {"": "actor_rollout_ref.actor.gradloc.action.mode=mask"}


def test_the_step_is_the_first_that_is_not_in_force_and_that_the_verl_has():
    moved = SEEN["The ratio: the policy has moved (staleness)"]
    assert next_step(moved).lines == {"": "actor_rollout_ref.actor.ppo_epochs=1"}
    assert "token_clip.mode=clamp" in next_step(moved, {"ppo_epochs": 1}).lines[""]
    both = {"ppo_epochs": 1, "gradloc": {"stabilize": {"token_clip": {"mode": "clamp"}}}}
    assert "token_clip.mode=clamp" in next_step(moved, both).lines[""], "the log-probs are not known to be there"


@pytest.mark.parametrize("seen", SEEN)
def test_a_run_that_masks_already_is_not_told_to(seen):
    step = next_step(replace(SEEN[seen], action=Action("mask", "mask")))
    assert step is None or not any(line.endswith(("action.mode=mask", "critic=mask")) for line in step.lines.values())


def test_a_checkpoint_that_is_known_is_named():
    found = replace(SEEN["Weights that are not finite"], consequence=Consequence(last_checkpoint="a b/step_4"))
    assert next_step(found).lines == {"": "trainer.resume_mode=resume_path trainer.resume_from_path='a b/step_4'"}


def test_the_docs_print_the_table():
    text = DOCS.read_text(encoding="utf-8")
    assert [rule.seen for rule in RULES] == re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", text, re.M)[2:]
