# SPDX-License-Identifier: Apache-2.0
"""Keys of the analyses and the filter: read, defaulted, refused in a sentence that names them."""

import pytest
from omegaconf import OmegaConf

from gradloc.analysis.config import BucketSettings, QuartileSettings, check_geometry, geometry, read_if_on
from gradloc.rollout_filter.config import read_filter


def make(trainer=(), rollout=(), actor=(), **rest):
    config = {
        "trainer": {"nnodes": 1, "n_gpus_per_node": 2, **dict(trainer)},
        "data": {"train_batch_size": 16},
        "reward_model": rest,
        "actor_rollout_ref": {"rollout": {"n": 4, **dict(rollout)}, "actor": dict(actor)},
    }
    return OmegaConf.create(config)


def buckets_of(config):
    return read_if_on(BucketSettings, config)


def quartiles_of(config):
    return read_if_on(QuartileSettings, config)


ON = {"gradient_analysis_mode": True}


def test_all_is_off_by_default_and_in_a_config_without_the_keys():
    assert buckets_of(make()) is None and quartiles_of(make()) is None
    assert read_filter(make()).keeps_all
    assert quartiles_of(make(trainer={"quartile_analysis_mode": True})) == QuartileSettings(mode=True)


TRAINER, ROLLOUT, ACTOR = "trainer", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
REFUSED = [
    (buckets_of, TRAINER, "gradient_analysis_mode", "yes", "true or false"),
    (buckets_of, ROLLOUT, "gradient_analysis_bucket_mode", "decile", "one of quantile, fixed_rv"),
    (quartiles_of, TRAINER, "quartile_analysis_num_tokens", -1, "an integer of at least 0"),
    (read_filter, ROLLOUT, "rollout_filter_value", 1.5, "a number above 0 and at most 1"),
    (read_filter, ACTOR, "filter_loss_scaling", "log", "one of none, linear, sqrt"),
]


@pytest.mark.parametrize("read, section, key, value, expected", REFUSED, ids=[case[2] for case in REFUSED])
def test_a_bad_value_is_refused_by_name_also_while_the_features_are_off(read, section, key, value, expected):
    with pytest.raises(ValueError) as refusal:
        read(make(**{section.rpartition(".")[2]: {key: value}}))
    assert str(refusal.value) == f"{section}.{key} must be {expected}, found {value!r}."


def test_a_filter_that_drops_groups_needs_the_rewards_at_once():
    with pytest.raises(ValueError, match="reward_model.launch_reward_fn_async must be false while"):
        read_filter(make(rollout={"rollout_filter_value": 0.5}, launch_reward_fn_async=True))


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"gradient_analysis_env_groups": 101}, "at most the 100 prompts of the training set, found 101"),
        (
            {"gradient_analysis_env_groups": 3, "gradient_analysis_group_size": 5},
            "a number that times the group size (5) is a multiple of the 2 data-parallel ranks",
        ),
    ],
    ids=["too many prompts", "uneven"],
)
def test_a_separate_batch_that_cannot_be_drawn_is_refused(keys, sentence):
    config = make(trainer={**ON, **keys})
    with pytest.raises(ValueError) as refusal:
        check_geometry(buckets_of(config), config, num_prompts=100)
    assert str(refusal.value).startswith("trainer.gradient_analysis_env_groups must be ")
    assert sentence in str(refusal.value)


def test_a_separate_batch_takes_the_training_geometry_where_nothing_is_said():
    config = make(trainer={**ON, "gradient_analysis_group_size": 6})
    settings = buckets_of(config)
    check_geometry(settings, config, num_prompts=100)
    assert settings.is_separate
    assert geometry(settings, config) == (16, 6)
    assert not buckets_of(make(trainer=ON)).is_separate
