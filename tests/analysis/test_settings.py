# SPDX-License-Identifier: Apache-2.0
"""Keys of the analysis and the filter: read, defaulted, refused in a sentence that names them."""

from types import SimpleNamespace

import pytest

from tests.analysis.pure import load

config = load("config")
read_filter = load("config", "rollout_filter").read_filter


class Section(SimpleNamespace):
    """Behaves like a part of an OmegaConf config where the code under test needs it."""

    def get(self, key, default=None):
        return getattr(self, key, default)


def make(trainer=(), rollout=(), actor=(), **rest):
    return Section(
        trainer=Section(**{"nnodes": 1, "n_gpus_per_node": 2, **dict(trainer)}),
        data=Section(train_batch_size=16),
        reward_model=Section(**rest),
        actor_rollout_ref=Section(
            rollout=Section(**{"n": 4, **dict(rollout)}), actor=Section(**{"strategy": "fsdp2", **dict(actor)})
        ),
    )


ON = {"gradient_analysis_mode": True}


def test_both_features_are_off_by_default_and_in_a_config_without_their_keys():
    assert config.read_buckets(make()) is None
    assert read_filter(make()).keeps_all


TRAINER, ROLLOUT, ACTOR = "trainer", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
REFUSED = [
    (TRAINER, "gradient_analysis_mode", "yes", "true or false"),
    (TRAINER, "gradient_analysis_every", 0, "an integer of at least 1"),
    (TRAINER, "exit_after_gradient_analysis", 1, "true or false"),
    (TRAINER, "gradient_analysis_env_groups", -1, "null or an integer of at least 1"),
    (TRAINER, "gradient_analysis_group_size", 0.5, "null or an integer of at least 1"),
    (ROLLOUT, "gradient_analysis_num_buckets", 0, "an integer of at least 1"),
    (ROLLOUT, "gradient_analysis_bucket_mode", "decile", "one of quantile, fixed_rv"),
    (ROLLOUT, "rollout_filter_strategy", "min_p", "one of top_p, top_k"),
    (ROLLOUT, "rollout_filter_value", 1.5, "a number above 0 and at most 1"),
    (ROLLOUT, "rollout_filter_metric", "entropy", "one of reward_variance, reward, length"),
    (ROLLOUT, "rollout_filter_type", "std", "one of largest, smallest"),
    (ROLLOUT, "rollout_filter_include_zero", 0, "true or false"),
    (ROLLOUT, "rollout_filter_top_p_prob_mode", "x", "one of linear, softmax"),
    (ACTOR, "filter_loss_scaling", "log", "one of none, linear, sqrt"),
]


@pytest.mark.parametrize("section, key, value, expected", REFUSED, ids=[case[1] for case in REFUSED])
def test_a_bad_value_is_refused_by_name_also_while_the_features_are_off(section, key, value, expected):
    read = read_filter if "filter" in key else config.read_buckets
    with pytest.raises(ValueError) as refusal:
        read(make(**{section.rpartition(".")[2]: {key: value}}))
    assert str(refusal.value) == f"{section}.{key} must be {expected}, found {value!r}."


def test_a_filter_that_drops_groups_needs_the_rewards_at_once():
    with pytest.raises(ValueError) as refusal:
        read_filter(make(rollout={"rollout_filter_value": 0.5}, launch_reward_fn_async=True))
    assert str(refusal.value).startswith("reward_model.launch_reward_fn_async must be false while")


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
    made = make(trainer={**ON, **keys})
    settings = config.read_buckets(made)
    with pytest.raises(ValueError) as refusal:
        config.check_geometry(settings, made, num_prompts=100)
    assert str(refusal.value).startswith("trainer.gradient_analysis_env_groups must be ")
    assert sentence in str(refusal.value)


def test_a_separate_batch_takes_the_training_geometry_where_nothing_is_said():
    made = make(trainer={**ON, "gradient_analysis_group_size": 6})
    settings = config.read_buckets(made)
    config.check_geometry(settings, made, num_prompts=100)
    assert settings.is_separate
    assert config.geometry(settings, made) == (16, 6)
    assert not config.read_buckets(make(trainer=ON)).is_separate
