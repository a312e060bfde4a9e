# SPDX-License-Identifier: Apache-2.0
"""What to do now, where it also follows from the run's own settings; the golden events hold the rules themselves."""

import math
from dataclasses import replace

import pytest

from gradloc.explain.advice import options_of
from gradloc.explain.causes import CAUSE_INFO, RULES
from gradloc.explain.cures import MILDEST_FIRST, OF_BATCH, cures_for, loss_settings
from gradloc.explain.next_step import FACTS, Evidence, next_step
from gradloc.record import CAUSES, Action, Event
from gradloc.record.reading import read
from tests.explain import a_culprit
from tests.explain import event as plain
from tests.report import events as golden
from tests.report.builder import make_culprit

TAUGHT = {"log_prob": -9.0, "teacher_log_prob": -0.1, "advantage": None}
DISTILLED = {"teacher_gap": 0.1}
ACTOR = "actor_rollout_ref.actor"


def event(name: str, **changes) -> Event:
    """One of the golden events, of a run of verl 0.7."""
    run = {"trainer": "verl 0.7.0", **golden.parts(name).get("run", {})}
    return read(Event, golden.event(name, **changes | {"run": run}))


def lines(found: Event, actor: dict | None = None) -> list[str]:
    step = next_step(found, actor)
    return [] if step is None else [*step.lines.values()]


def test_every_cause_and_rule_is_a_golden_event_or_needs_the_run_s_config():
    assert {f"cause {label}" for label in CAUSES} <= {*golden.CASES} and len(golden.CASES) > 100
    assert [rule.seen for rule in RULES if rule.seen not in golden.CASES] == [
        "NaN on padding, under a loss that gives NaN there"
    ]
    assert {name for rule in RULES for name in rule.when} == {*FACTS}
    padding = event("Only padding is not finite")
    assert lines(padding, {"policy_loss": {"loss_mode": "clip_cov"}}) == [f"{ACTOR}.policy_loss.loss_mode=vanilla"]


@pytest.mark.parametrize("trainer", ["verl 0.9.1", "trl 1.16.0", "loop", "nemo_rl 0.6", None])
def test_each_event_has_its_advice_whichever_trainer_made_the_run(trainer):
    told = {}
    for name in (name for name, case in golden.CASES.items() if "event" in case):
        found = event(name)
        told[name] = lines(replace(found, run=replace(found.run, trainer=trainer)))
    if trainer == "trl 1.16.0":
        assert told["A rehearsal: the step was asked for"] == ['gradloc={"trigger": {"force_step": None}}']


POLICY_MOVED = "The policy moved away from the old one at a token"
CLAMPED = {"ppo_epochs": 1, "gradloc": {"stabilize": {"token_clip": {"mode": "clamp"}}}}


@pytest.mark.parametrize(
    ("name", "changes", "actor", "line"),
    [
        ("A loss without a finite gradient", {}, {}, f"{ACTOR}.kl_loss_type=mse"),
        ("A loss without a finite gradient", {}, {"use_kl_loss": False}, f"{ACTOR}.clip_ratio_c=2.0"),
        (POLICY_MOVED, {}, {}, f"{ACTOR}.ppo_epochs=1"),
        (POLICY_MOVED, {}, {"ppo_epochs": 1}, f"{ACTOR}.gradloc.stabilize.token_clip.mode=clamp"),
        (POLICY_MOVED, {}, CLAMPED, f"{ACTOR}.gradloc.stabilize.token_clip.mode=clamp"),  # log-probs may be missing
        (POLICY_MOVED, {"batch": DISTILLED}, {}, f"{ACTOR}.ppo_epochs=1"),
        (POLICY_MOVED, {"batch": DISTILLED}, {"ppo_epochs": 1}, f"{ACTOR}.gradloc.action.mode=mask"),
        ("made by verl 0.7.0", {"certificate": {"verdict": "undecided"}}, {}, "trainer.rollout_data_dir=rollouts"),
    ],
)
def test_the_step_is_the_first_that_is_not_in_force_and_that_can_help(name, changes, actor, line):
    found = event(name, **changes)
    if changes.get("batch"):
        found = replace(found, culprits=(a_culprit(found.culprits[0], **TAUGHT | {"log_prob": -1.0}),))
    assert lines(found, actor)[0].startswith(line)


def test_a_distilled_run_is_not_told_of_rewards():
    told = [line for _, line in CAUSE_INFO["low_probability"].advice("verl 0.9.1", is_distilled=True)]
    assert len(told) == 3 and not any("reweighting" in line or "lopti" in line for line in told)


def test_an_estimator_that_divides_by_nothing_is_not_told_to_drop_the_division():
    found = event("The advantage is more than its estimator gives, or its group is odd")
    assert lines(found) == ["algorithm.norm_adv_by_std_in_grpo=false"]
    assert lines(replace(found, run=replace(found.run, estimator="grpo_mean"))) == [f"{ACTOR}.gradloc.action.mode=mask"]


def test_a_run_that_masks_already_is_not_told_to():
    for name in golden.OF_RULES:
        told = lines(replace(event(name), action=Action("mask", "mask")))
        assert not any(line.endswith(("action.mode=mask", "critic=mask")) for line in told), name


# ---- settings that were measured


def test_a_reader_is_told_of_what_was_measured_and_of_what_the_cause_calls_for():
    named = [[of.name for of in cures_for(event(name))] for name in ("healed", "healed, of low probability")]
    assert named[0][:3] == ["dual_clip", "clip_ratios", "gspo"] and named[1] == ["dual_clip", "reweight", "gspo"]
    assert cures_for(event("adaptive")) is None


def test_every_setting_has_a_line_that_is_read_and_its_place_among_them_where_a_cause_names_it():
    for cure in MILDEST_FIRST:
        told = [options_of(cure, trainer).get("") for trainer in ("verl 0.7.0", "verl 0.9.1", "trl 1.16.0")]
        assert any(told) and all(loss_settings(option) for option in told if option), cure
    named = {name for meaning in CAUSE_INFO.values() for name in meaning.cures}
    assert not named ^ {*MILDEST_FIRST}, "these are to be in both: cures of explain/causes.ini and MILDEST_FIRST"
    assert named > {*OF_BATCH}


# ---- what an event says beyond its cause's name

INF = math.inf


@pytest.mark.parametrize(
    ("log_probs", "drift", "do_differ"),
    [
        ((-1.0, -1.0, -5.0), 0.0, True),
        ((-1.0, -3.0, -5.0), 2.0, True),
        ((-1.0, -4.0, -5.0), 3.0, False),
        ((-1.0, -1.0, -1.1), 0.0, False),
        ((-1.0, None, -5.0), 0.0, False),
        ((-INF, -1.0, -5.0), 0.0, True),
        ((-1.0, -1.0, "-Infinity"), 0.0, False),
    ],
)
def test_engines_differ_where_they_did_before_the_update_and_by_more_than_the_policy_moved(log_probs, drift, do_differ):
    now, old, rollout = ("-Infinity" if value == -INF else value for value in log_probs)
    culprit = make_culprit(log_prob=now, old_log_prob_stored=old, rollout_log_prob=rollout)
    evidence = Evidence(plain(culprits=[culprit]))
    assert (evidence.drift, evidence.do_engines_differ) == (drift, do_differ)
    assert FACTS["engines_differ"](evidence) == do_differ


@pytest.mark.parametrize(
    ("norm", "verdict", "is_judged"),
    [
        (747.66, "explained", True),
        (None, "explained", True),
        ("Infinity", "explained", False),
        (9.0, "undecided", False),
    ],
)
def test_a_certificate_judges_culprits_of_a_norm_that_is_finite_or_not_told(norm, verdict, is_judged):
    trigger = {"kind": "relative", "grad_norm": norm, "threshold": 52.26}
    made = plain(trigger=trigger, certificate={"verdict": verdict})
    assert Evidence(made).is_judged("explained") == is_judged
    assert not Evidence(plain(culprits=[], trigger=trigger)).is_judged("explained")


def test_the_pull_is_the_teacher_s_the_weight_or_the_advantage():
    assert Evidence(plain()).as_text()["Pull"] == "Advantage (10,000)"
    culprit = make_culprit(teacher_log_prob=-0.25)
    told = Evidence(plain(culprits=[culprit], batch={"teacher_gap": 0.1})).as_text()
    assert told["Pull"] == "The teacher's (-0.25)" and "teacher" in told["pull"]
    assert "teacher" not in Evidence(plain()).as_text()["pull"]


def test_a_token_is_punished_by_a_negative_advantage():
    made = [Evidence(plain(culprits=[make_culprit(advantage=of)])) for of in (-0.5, 0.0, 0.5, None)]
    assert [*map(FACTS["punished"], made)] == [True, False, False, False]
