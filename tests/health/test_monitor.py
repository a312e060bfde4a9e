# SPDX-License-Identifier: Apache-2.0
"""The monitor: what it adds, what it says, that it never stops a run; and what it is given in verl's trainer."""

import json

import pytest
import torch

from gradloc.health.config import HealthConfig
from gradloc.health.monitor import Monitor
from gradloc.loop.batch import BatchView

SHARE = "rollout/zero_variance_share"
CALM = {"actor/grad_norm": 0.5, "actor/pg_loss": 0.01, "critic/score/mean": 0.4}
PAIRS = [("a", 1.0), ("b", 0.0), ("a", 1.0), ("b", 1.0), ("c", 0.5), ("c", 0.5)]
TWO = [("a", 1.0), ("a", 0.0)]
CHI2, KL = "rollout_corr/chi2_token", "actor/ppo_kl"


def monitor(**settings):
    return Monitor(HealthConfig(enable=True), 1.0, **settings)


def batch_of(rewards):
    """A batch of 3 tokens a row; ``rewards`` are (uid, sum of the row's scores)."""
    scores = torch.zeros(len(rewards), 3)
    scores[:, -1] = torch.tensor([score for _, score in rewards])
    tensors = {"token_level_scores": scores, "response_mask": torch.ones(len(rewards), 3)}
    return BatchView(tensors, {"uid": [uid for uid, _ in rewards]})


def observed(rewards, metrics=(), **settings):
    """The metrics after one observed step."""
    found = {**CALM, **dict(metrics)}
    monitor(**settings).observe(batch_of(rewards), found, 1)
    return found


def test_it_adds_the_state_and_the_share_of_prompts_with_equal_rewards():
    found = observed(PAIRS)
    assert found[SHARE] == pytest.approx(2 / 3)  # of a, b and c, only b's rollouts differ
    assert found["health/state"] == 0 and found["health/reasons"] == 0
    assert found["health/failures"] == 0
    assert not any("min" in name or "max" in name for name in set(found) if "health" in name)


def test_a_share_that_is_logged_is_left_as_it_is_and_there_is_none_where_rollouts_are_not_compared():
    assert observed(PAIRS, {SHARE: 0.125})[SHARE] == 0.125
    assert SHARE not in observed([("a", 1.0), ("b", 1.0)])  # one rollout per prompt
    assert SHARE not in observed(PAIRS, compares_rollouts=False)
    assert observed([("a", 1.0), ("a", 0.0), ("b", 1.0)])[SHARE] < 1  # of some prompts there are more


def test_rollouts_that_are_not_compared_are_not_judged_by_what_a_filter_tells():
    made = monitor(compares_rollouts=False)
    for step in range(1, 9):
        found = {**CALM, SHARE: 1.0}
        made.observe(batch_of(PAIRS), found, step)
    assert found["health/state"] == 0


def test_a_failure_is_logged_and_counted_and_the_step_goes_on(caplog):
    made, nobody = monitor(), BatchView(batch_of(PAIRS).tensors, {})
    for step in (1, 2):
        found = dict(CALM)
        made.observe(nobody, found, step)
        assert found["health/failures"] == step
    assert "judging step 1 failed; training goes on" in caplog.text


def test_a_step_without_any_known_metric_gets_no_state():
    found = observed(PAIRS, dict.fromkeys(CALM), compares_rollouts=False)
    assert "health/state" not in found and found["health/failures"] == 0


def test_a_state_has_its_number_and_counts_its_reasons():
    found = observed(TWO, {CHI2: 500.0, KL: 0.2})
    assert (found["health/state"], found["health/reasons"]) == (2, 2)
    assert observed(TWO, {KL: 0.2})["health/state"] == 1


def test_a_checkpoint_in_between_changes_nothing_and_what_was_told_is_not_told_again(capsys):
    made, states = monitor(), []
    for step in range(1, 23):
        if step in (15, 22):
            kept = json.loads(json.dumps(made.state()))
            made = monitor()
            made.load_state(kept)
        metrics = {**CALM, "actor/grad_norm": 500.0 if step > 20 else 0.5 + 0.01 * (step % 3)}
        made.observe(batch_of(TWO), metrics, step)
        states.append(metrics["health/state"])
    assert states == [0] * 20 + [2, 2] and capsys.readouterr().out.count("danger") == 1


def said(made, capsys, *steps, first=1):
    """What is printed of steps with these metrics beside the calm ones."""
    for step, extra in enumerate(steps, first):
        made.observe(batch_of(TWO), {**CALM, **extra}, step)
    return capsys.readouterr().out.splitlines()


def test_a_line_is_printed_when_the_state_changes_or_a_rule_comes_to_danger(capsys):
    loud = {CHI2: 500.0}
    assert said(monitor(), capsys, {}, loud, loud, {**loud, KL: 3.0}, {}, {}) == [
        "health: step 2: danger (was healthy). "
        "mismatch_chi2: rollout_corr/chi2_token, measured between the policy in the update and the rollout "
        "engine, is 500 (limit 100).",
        "health: step 4: danger. policy_kl: actor/ppo_kl is 3 (limit 1). And 1 more reason.",
        "health: step 5: healthy (was danger).",
    ]


def test_a_danger_that_comes_back_within_others_is_no_news_and_after_calm_it_is(capsys):
    both, one = {CHI2: 500.0, KL: 3.0}, {CHI2: 500.0}
    lines = said(monitor(), capsys, both, one, both, {}, both)
    assert [line.partition(".")[0] for line in lines] == [
        "health: step 1: danger (was healthy)",
        "health: step 4: healthy (was danger)",
        "health: step 5: danger (was healthy)",
    ]
    assert "And 1 more reason." in lines[0]
    three = {**both, "rollout_corr/rollout_is_std": 50.0, "rollout_corr/kl": 50.0}
    assert "And 3 more reasons." in said(monitor(), capsys, three)[0]


# ---- in verl's trainer


def test_it_takes_the_clip_limit_and_the_estimator_from_the_config_and_is_saved_in_the_step_s_checkpoint(single):
    assert single.run("tests.health.monitor_probe.answer")[0] == {
        "checkpointed": [3, 3, ["gradloc.json"]],
        "fsdp": [1.0, True],
        "megatron": [0.7, True],
        "engine": [0.7, True],
        "layers": [None, True],  # each layer has a limit of its own
        "unclipped": [None, True],
        "gae": [1.0, False],
        "off": [True, True],
    }
