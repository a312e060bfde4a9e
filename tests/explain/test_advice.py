# SPDX-License-Identifier: Apache-2.0
"""Every config line is one that its verl takes, builds and reads; a reader is told those of the verl that ran."""

from pathlib import Path

import pytest

from gradloc.explain.advice import (
    ACTIONS,
    LOOP,
    Advice,
    actions_of,
    in_force,
    in_verls_names,
    lines_of,
    options_of,
    sampling_cut,
)
from gradloc.explain.causes import CAUSE_INFO, RULES
from gradloc.explain.cures import MILDEST_FIRST, is_measured
from gradloc.health.rules import ADVICE

ROOT = Path(__file__).resolve().parents[2]


def test_every_line_for_0_7_composes_builds_and_is_read(single):
    """For 0.9: tests/adapters/verl09/test_advice.py."""
    assert single.run("tests.explain.composed.main", verl="0.7") == [{}]


def test_every_action_is_given_by_somebody_and_every_one_given_is_there():
    lists = [*ADVICE.values(), *(each.do for each in (*CAUSE_INFO.values(), *RULES)), MILDEST_FIRST, ["more_probes"]]
    given = {name for names in lists for name in names}
    assert not given ^ set(ACTIONS), "name these in a do or in MILDEST_FIRST, or in actions.ini"
    assert all(action.do.endswith(".") for action in ACTIONS.values())
    assert all(any(lines_of(name, trainer) for trainer in ("verl 0.7", "verl 0.9", "trl", LOOP)) for name in ACTIONS)


TRL = "trl 1.16.0"
LINES = [
    ("clip", "verl 0.9.1", "actor_rollout_ref.actor.optim.clip_grad=0.5"),
    ("clip", "verl 0.7.0", "actor_rollout_ref.actor.grad_clip=0.5"),
    ("clip", TRL, "max_grad_norm=0.5"),
    ("mask", TRL, 'gradloc="mask"'),
    ("rerun", TRL, 'gradloc={"evidence": {"rerun": True}}'),
    ("more_steps", TRL, 'gradloc={"search": {"max_steps": 8}}'),
    ("smaller_steps", TRL, "learning_rate=5e-07"),
    ("clip_ratios", TRL, "epsilon=0.2, epsilon_high=0.2"),
    ("cispo", TRL, 'loss_type="cispo", epsilon_high=5.0'),
    ("fp32", TRL, 'model_init_kwargs={"dtype": "float32"}'),
    ("fp32_forward", TRL, "bf16=False"),
    ("mean_only", TRL, 'scale_rewards="none"'),
    *((name, TRL, None) for name in ("clip_tokens", "lopti", "mask_padding")),
    ("mask", LOOP, 'Watch(..., action="mask")'),
    ("mask_padding", LOOP, "mask = ids != tokenizer.pad_token_id"),
    ("gspo", LOOP, None),
    ("one_epoch", None, "actor_rollout_ref.actor.ppo_epochs=1"),
    ("mask_padding", None, None),
]


@pytest.mark.parametrize(("name", "trainer", "said"), LINES)
def test_an_action_is_said_in_the_words_of_the_trainer_that_ran_or_not_at_all(name, trainer, said):
    assert lines_of(name, trainer) == ({} if said is None else {"": said})


def test_a_record_that_does_not_say_it_is_told_both_where_they_differ():
    assert list(lines_of("clip", None)) == ["verl 0.9", "verl 0.7"]
    assert [do for do, _ in actions_of(["clip"])] == [
        f"Clip the gradient harder ({verl})." for verl in ("verl 0.9", "verl 0.7")
    ]


def test_what_a_verl_has_no_line_for_is_not_told_there(monkeypatch):
    monkeypatch.setitem(ACTIONS, "old", Advice("Do it the old way.", {"": {"a": "1"}, "0.9": {}, "trl": {"b": "1"}}))
    assert lines_of("old", "verl 0.9.1") == {} and list(lines_of("old", None)) == ["verl 0.7"]
    assert lines_of("old", "trl") == {"": "b=1"} and lines_of("old", "trl", {"a": 1}) == {}, "done already"
    assert actions_of(["old", "one_epoch"], "verl 0.9.1") == actions_of(["one_epoch"])


def test_what_a_run_has_already_is_known_where_its_config_is():
    actor = {"ppo_epochs": 1, "policy_loss": {"loss_mode": "gspo"}, "use_kl_loss": True, "optim": None}
    names = ("one_epoch", "gspo", "use_kl", "plain_loss", "smaller_steps")
    found = [in_force(options_of(name, "verl 0.7.0")[""].settings, actor) for name in names]
    assert found == [True, True, True, False, False]
    assert not in_force({"trainer.resume_mode": "resume_path"}, actor), "of the actor alone"


def test_a_run_s_settings_are_read_by_verls_names():
    found = in_verls_names({"learning_rate": 1e-6, "num_iterations": 2, "seed": 3}, "trl 1.16.0")
    assert found == {"actor_rollout_ref.actor.optim.lr": 1e-6, "actor_rollout_ref.actor.ppo_epochs": 2}
    assert in_verls_names({"seed": 3}, "verl 0.9.1") == {"seed": 3}


@pytest.mark.parametrize(
    ("settings", "trainer", "is_told"),
    [
        ({"actor_rollout_ref.rollout.top_p": 0.95}, "verl", True),
        ({"actor_rollout_ref.rollout.top_p": "1.0", "actor_rollout_ref.rollout.top_k": "-1"}, "verl", False),
        ({"top_k": 50, "num_generations": 8}, "trl", True),
        ({"min_p": 0.05, "num_generations": 8}, "trl", True),
        ({"top_k": 1, "num_generations": 8}, "trl", True),
        ({"top_k": 50}, "trl", False),  # a model's generation settings, in a run without rollouts
        ({}, "other", False),
    ],
)
def test_a_cut_of_the_sampling_is_told_where_it_is_on(settings, trainer, is_told):
    assert bool(sampling_cut(settings, trainer)) == is_told


def test_no_cut_of_the_sampling_is_advised():
    lines = [action.line(verl) for action in ACTIONS.values() for verl in ("0.7", "0.9")]
    assert not [line for line in lines if "rollout.top_" in line or "min_p" in line]


def test_a_cure_is_measured_where_the_trainer_has_a_line_for_it_and_can_recompute_what_it_changes():
    assert is_measured("truncate", "verl 0.9") and is_measured("truncate", "trl") and is_measured("clip", "trl")
    assert not is_measured("clip_tokens", "trl"), "of the batch, which TRL has no such setting of"
    assert not is_measured("gspo", LOOP)
