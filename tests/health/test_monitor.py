# SPDX-License-Identifier: Apache-2.0
"""The monitor on verl's own batches: what it adds, what it says, and that it never stops a run."""

import pytest

SHARE = "rollout/zero_variance_share"


@pytest.fixture(scope="module")
def probe(single):
    """The probe's answers, what it printed of health, and its log."""
    found, lines, log = single.run("tests.health.monitor_probe.answer")[0]
    return found, [line for line in lines if line.startswith("health")], log


def test_it_adds_the_state_and_the_share_of_prompts_with_equal_rewards(probe):
    found = probe[0]["share"]
    assert found[SHARE] == pytest.approx(2 / 3)  # of a, b and c, only b's rollouts differ
    assert found["health/state"] == 0 and found["health/reasons"] == 0
    assert found["health/failures"] == 0
    assert not any("min" in name or "max" in name for name in set(found) if "health" in name)


def test_a_share_that_is_logged_already_is_left_as_it_is(probe):
    assert probe[0]["given"][SHARE] == 0.125


def test_there_is_no_share_where_rollouts_are_not_compared(probe):
    assert SHARE not in probe[0]["single"]  # one rollout per prompt
    assert SHARE not in probe[0]["critic"]


def test_a_failure_is_logged_and_counted_and_the_step_goes_on(probe):
    answers, _, log = probe
    assert answers["broken"]["health/failures"] == 1
    assert "judging step 1 failed; training goes on" in log


def test_a_step_without_any_known_metric_gets_no_state(probe):
    assert "health/state" not in probe[0]["nothing"]


def test_a_checkpoint_in_between_changes_nothing(probe):
    whole, resumed = probe[0]["resumed"]
    assert whole == resumed == [0] * 20 + [2]


def test_a_checkpoint_holds_the_step_that_it_was_saved_in(probe):
    assert probe[0]["checkpointed"] == [3, 3, ["gradloc.json"]]


def test_a_line_is_printed_when_the_state_changes_or_a_rule_comes_to_danger(probe):
    assert probe[1][:3] == [
        "health: step 2: danger (was healthy). "
        "mismatch_chi2: rollout_corr/chi2_token, of the policy in the update against the rollout "
        "engine, is 500 (limit 100).",
        "health: step 4: danger. policy_kl: actor/ppo_kl is 3 (limit 1). And 1 more reason.",
        "health: step 5: healthy (was danger).",
    ]


def test_the_clip_limit_is_the_one_that_the_actor_clips_to(probe):
    answers = probe[0]
    assert answers["fsdp"] == [1.0, True]
    assert answers["megatron"] == answers["engine"] == [0.7, True]
    assert answers["layers"] == [None, True]  # each layer has a limit of its own
    assert answers["unclipped"] == [None, True]


def test_an_estimator_that_does_not_compare_rollouts_is_known(probe):
    assert probe[0]["gae"] == [1.0, False]


def test_it_is_none_while_off_and_for_a_trainer_without_the_block(probe):
    assert probe[0]["off"] == [True, True]
