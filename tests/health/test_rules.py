# SPDX-License-Identifier: Apache-2.0
"""Every rule says what it is there to say, in both states, and nothing else does."""

import math

import pytest

from gradloc.explain.advice import actions_of
from gradloc.health.rules import ADVICE
from gradloc.report.runs.health import STATES, HealthConfig
from tests.health.histories import CALM, TROUBLES, healthy, named, run, with_trouble


def test_a_healthy_run_is_healthy_at_every_step_also_where_its_loss_is_0_as_on_policy_grpo_s_is():
    for changes in ({}, {"actor/pg_loss": 0.0}):
        verdicts = run([{**healthy(step), **changes} for step in range(1, 400)])
        assert {verdict.state for verdict in verdicts} == {"healthy"}


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: f"{t.rule}-{t.state}")
def test_a_rule_finds_its_trouble_alone_and_says_so_with_numbers_and_advice_or_is_off(trouble):
    verdicts = run(with_trouble(trouble))
    assert all(not verdict.reasons for verdict in verdicts[:CALM])
    assert {name for verdict in verdicts for name in named(verdict)} == {trouble.rule}
    (reason,) = verdicts[-1].reasons
    assert reason.name == trouble.rule and reason.state == trouble.state == verdicts[-1].state
    assert reason.limit == getattr(HealthConfig(), trouble.rule)[STATES.index(trouble.state) - 1]
    assert math.isfinite(reason.found) and reason.metric
    assert reason.sentence.endswith(".") and "{" not in reason.sentence
    advice = actions_of(ADVICE[reason.name])
    assert advice and all("=" in line and do.endswith(".") for do, line in advice)
    assert not run(with_trouble(trouble), HealthConfig(**{trouble.rule: None}))[-1].reasons


def test_every_state_of_every_rule_has_a_history_here():
    tested = {(trouble.rule, trouble.state) for trouble in TROUBLES}
    config = HealthConfig()
    expected = {
        (name, state)
        for name in config.rule_names()
        for state, limit in zip(STATES[1:], getattr(config, name), strict=True)
        if limit is not None
    }
    assert tested == expected


LEARNING = (
    "gradient_jump", "head_norm", "reward_fall", "entropy_fall", "entropy_rise", "reference_kl_jump",
    "mismatch_rise", "length_rise", "length_fall",
)  # fmt: skip


@pytest.mark.parametrize("trouble", [t for t in TROUBLES if t.rule in LEARNING], ids=lambda t: f"{t.rule}-{t.state}")
def test_a_rule_about_the_runs_own_history_is_silent_in_the_warm_up(trouble):
    # the whole trouble lies within the first ten values
    verdicts = run(with_trouble(trouble, calm=10 - trouble.steps))
    assert all(trouble.rule not in named(verdict) for verdict in verdicts)


STRICT = (
    "mismatch_kl", "mismatch_chi2", "mismatch_weight", "mismatch_spread", "mismatch_sample_size", "mismatch_veto",
    "mismatch_probs", "aborted",
)  # fmt: skip
"""verl's documentation says > and <: at the limit all is well."""
METRICS = {trouble.rule: next(iter(trouble.metrics)) for trouble in TROUBLES}


@pytest.mark.parametrize("rule", [*STRICT, "policy_kl", "spikes", "clip_fraction", "zero_variance", "truncation"])
def test_verls_alert_rules_are_silent_at_the_limit_and_all_others_speak(rule):
    limit, ends = getattr(HealthConfig(), rule)[0], (-math.inf, math.inf)
    under, over = (math.nextafter(limit, end) for end in (ends[::-1] if rule == "mismatch_sample_size" else ends))
    last = [run([{**healthy(s), METRICS[rule]: value} for s in range(1, 6)])[-1] for value in (under, limit, over)]
    assert [rule in named(verdict) for verdict in last] == [False, rule not in STRICT, True]


def test_a_mean_weight_far_over_1_is_as_odd_as_one_far_below_it():
    row = {**healthy(1), "rollout_corr/rollout_is_mean": 4.0}
    assert named(run([row])[0]) == {"mismatch_weight": "warning"}


def test_norms_are_logged_before_clipping_so_one_above_the_limit_is_no_trouble_by_itself():
    rows = [{**healthy(step), "actor/grad_norm": 3.0, "actor/grad_norm_max": 3.2} for step in range(1, 60)]
    verdicts = run(rows)
    assert [named(verdict) for verdict in verdicts[:19]] == [{}] * 19  # the window is not full yet
    assert all(named(verdict) == {"clip_share": "warning"} for verdict in verdicts[19:])
    assert not run(rows, grad_clip=None)[-1].reasons  # without a clip there is no limit to be at


def test_without_a_maximum_the_mean_gradient_is_judged():
    rows = [healthy(step) for step in range(1, 20)]
    for row in rows:
        del row["actor/grad_norm_max"]
    rows[-1]["actor/grad_norm"] = 50.0
    (reason,) = run(rows)[-1].reasons
    assert (reason.name, reason.state, reason.metric) == ("gradient_jump", "danger", "actor/grad_norm")


def test_unpatched_verl_shows_equal_rewards_by_their_maximum_and_minimum():
    rows = [healthy(step) for step in range(1, 40)]
    for row in rows:
        del row["rollout/zero_variance_share"]
    assert not run(rows)[-1].reasons
    for row in rows[-5:]:
        row.update({"critic/score/max": 0.0, "critic/score/min": 0.0})
    assert named(run(rows)[-1]) == {"zero_variance": "danger"}


def test_a_spike_does_not_become_the_norm_but_a_lasting_level_does():
    rows = [healthy(step) for step in range(1, 80)]
    for row in rows[30:]:
        row.update({"actor/grad_norm": 0.9, "actor/grad_norm_max": 30.0})
    states = [named(verdict).get("gradient_jump") for verdict in run(rows)]
    assert states[:30] == [None] * 30
    assert states[30:37] == ["warning"] * 7  # seven spikes in a row are spikes
    assert set(states[50:]) == {None}  # from eight on the level has moved


def test_a_collapsed_reward_stays_collapsed_until_it_recovers():
    rows = [healthy(step) for step in range(1, 301)]
    for row in rows[60:200]:
        row["critic/score/mean"] = 0.02
    states = [named(verdict).get("reward_fall") for verdict in run(rows)]
    assert set(states[:60]) == {None} and set(states[66:200]) == {"danger"}
    assert set(states[210:]) == {None}


def test_a_reward_that_never_was_is_no_fall_but_equal_rewards():
    still = {"critic/score/mean": 0.0, "critic/score/max": 0.0, "rollout/zero_variance_share": 1.0}
    rows = [{**healthy(step), **still} for step in range(1, 40)]
    assert named(run(rows)[-1]) == {"zero_variance": "danger"}
