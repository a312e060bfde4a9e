# SPDX-License-Identifier: Apache-2.0
"""Advice is said in the settings of the trainer that the run was on."""

import pytest

from gradloc.words.advice import lines_of, replay_lines, trl_settings

ACTOR = "actor_rollout_ref.actor"
LINES = {
    f"{ACTOR}.gradloc.action.mode=mask": 'gradloc="mask"',
    f"{ACTOR}.gradloc.evidence.rerun=true": 'gradloc={"evidence": {"rerun": True}}',
    f"{ACTOR}.gradloc.search.max_steps=8": 'gradloc={"search": {"max_steps": 8}}',
    f"{ACTOR}.optim.lr=5e-7": "learning_rate=5e-07",
    f"{ACTOR}.fsdp_config.dtype=float32": "bf16=False",
    f"{ACTOR}.grad_clip=0.5 {ACTOR}.ppo_epochs=1": "max_grad_norm=0.5, num_iterations=1",
    "algorithm.norm_adv_by_std_in_grpo=false": 'scale_rewards="none"',
    f"{ACTOR}.gradloc.stabilize.token_clip.mode=clamp": None,
    "algorithm.lopti.enable=true": None,
}


@pytest.mark.parametrize("line, said", LINES.items())
def test_a_setting_of_verls_is_said_in_trls_words_or_not_at_all(line, said):
    assert trl_settings(line) == said


def test_an_action_and_a_replay_are_those_of_the_records_trainer():
    assert lines_of("mask", "trl 1.16.0") == {"": 'gradloc="mask"'}
    assert replay_lines("events/a", "trl 1.16.0") == {"": "python -m gradloc.replay events/a --model MODEL_PATH"}
