# SPDX-License-Identifier: Apache-2.0
"""Advice is said in the settings of the trainer that the run was on."""

import json
from importlib import resources

import pytest

from gradloc.words.settings import setting_of

ACTOR = "actor_rollout_ref.actor"
LINES = {
    f"{ACTOR}.gradloc.action.mode=mask": 'gradloc="mask"',
    f"{ACTOR}.gradloc.evidence.rerun=true": 'gradloc={"evidence": {"rerun": True}}',
    f"{ACTOR}.gradloc.search.max_steps=8": 'gradloc={"search": {"max_steps": 8}}',
    f"{ACTOR}.optim.lr=5e-7": "learning_rate=5e-07",
    f"{ACTOR}.fsdp_config.dtype=float32": "bf16=False",
    "algorithm.norm_adv_by_std_in_grpo=false": 'scale_rewards="none"',
    "trainer.resume_mode=resume_path trainer.resume_from_path=a/b": "trainer.train(resume_from_checkpoint='a/b')",
    f"{ACTOR}.gradloc.stabilize.token_clip.mode=clamp": None,
    "algorithm.lopti.enable=true": None,
}


@pytest.mark.parametrize("line, said", LINES.items())
def test_a_setting_of_verls_is_said_in_trls_words_or_not_at_all(line, said):
    assert setting_of("trl", line) == said and setting_of(None, line) == line


def test_most_causes_keep_advice_on_trl():
    text = resources.files("gradloc.report").joinpath("assets/advice.json").read_text(encoding="utf-8")
    left = {
        label: [line for _, line in entry["advice"] if setting_of("trl", line)]
        for label, entry in json.loads(text).items()
    }
    without = {label for label, lines in left.items() if not lines}
    assert without <= {"value_outlier", "non_finite_padding"}, without
