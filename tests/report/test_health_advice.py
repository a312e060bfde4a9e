# SPDX-License-Identifier: Apache-2.0
"""Health advises nothing that a run has already, and no cut of the sampling; it tells of one that is on."""

import pytest

from gradloc.words.advice import ACTIONS, actions_of, sampling_cut


def test_what_a_run_has_already_is_left_out():
    settings = {"actor_rollout_ref.actor.optim.lr": 2e-7, "actor_rollout_ref.actor.use_kl_loss": True}
    told = [line for _, line in actions_of(["smaller_steps", "use_kl", "keep_rollouts"], "verl 0.9.1", settings)]
    assert told == ["actor_rollout_ref.actor.optim.lr=1e-07", "trainer.rollout_data_dir=rollouts"]


@pytest.mark.parametrize(
    ("settings", "trainer", "is_told"),
    [
        ({"actor_rollout_ref.rollout.top_p": 0.95}, "verl", True),
        ({"actor_rollout_ref.rollout.top_p": "1.0", "actor_rollout_ref.rollout.top_k": "-1"}, "verl", False),
        ({"top_k": 50, "num_generations": 8}, "trl", True),
        ({"min_p": 0.05, "num_generations": 8}, "trl", True),
        ({"top_k": 50}, "trl", False),  # a model's generation settings, in a run without rollouts
        ({}, "other", False),
    ],
)
def test_a_cut_of_the_sampling_is_told_where_it_is_on(settings, trainer, is_told):
    assert bool(sampling_cut(settings, trainer)) == is_told


def test_no_cut_of_the_sampling_is_advised():
    lines = [action.line(verl) for action in ACTIONS.values() for verl in ("0.7", "0.9")]
    assert not [line for line in lines if "rollout.top_" in line or "min_p" in line]
