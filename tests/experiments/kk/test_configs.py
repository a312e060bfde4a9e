# SPDX-License-Identifier: Apache-2.0
"""The published experiments have the published values.

That they become verl's dataclasses is a test of every experiment's, in tests/experiments.
"""

import pytest

pytest.importorskip("hydra")
pytest.importorskip("pysat")

from experiments import catalog  # noqa: E402
from experiments.kk import language  # noqa: E402
from tests.experiments.test_configs import environment  # noqa: E402

pytestmark = pytest.mark.full

# alpha, eta (None: no Lopti), from the four scripts of the authors' repository.
PUBLISHED = {"kk-baseline": (0.0, None), "kk-ar": (0.2, None), "kk-lopti": (0.0, 0.4), "kk-ar-lopti": (0.3, 0.5)}


@pytest.fixture
def compose(tmp_path, patched_tree, monkeypatch):
    """Composes an experiment with overrides, as verl's entry point would."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    for key, value in environment(tmp_path, patched_tree).items():
        monkeypatch.setenv(key, value)
    searchpath = f"hydra.searchpath=[file://{patched_tree}/verl/trainer/config]"

    def call(name, *overrides):
        config_name, arguments = catalog.load(name).arguments(overrides)
        with initialize_config_dir(str(catalog.CONFIGS), version_base=None):
            config = compose(config_name, overrides=[*arguments, searchpath])
        return OmegaConf.to_container(config, resolve=True)

    return call


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_experiment_has_the_published_values(compose, name):
    config = compose(name)
    alpha, eta = PUBLISHED[name]
    algorithm, data = config["algorithm"], config["data"]
    worker, trainer = config["actor_rollout_ref"], config["trainer"]
    actor, rollout = worker["actor"], worker["rollout"]
    assert algorithm["advantage_reweighting"]["alpha"] == alpha
    assert algorithm["lopti"]["enable"] is (eta is not None)
    assert eta is None or (algorithm["lopti"]["eta"], algorithm["lopti"]["quantile"]) == (eta, None)
    assert (algorithm["adv_estimator"], algorithm["use_kl_in_reward"]) == ("grpo", False)
    assert data["train_batch_size"] == 64 and rollout["n"] == 8
    assert (data["max_prompt_length"], data["max_response_length"]) == (400, 4096)
    assert rollout["temperature"] == 0.7 and rollout["tensor_model_parallel_size"] == 1
    # 256 rows and 32 rows over 4 GPUs, as the fork counts them.
    assert actor["ppo_mini_batch_size"] * rollout["n"] == 256
    assert actor["ppo_micro_batch_size_per_gpu"] * trainer["n_gpus_per_node"] == 32
    assert [actor[f"clip_ratio{end}"] for end in ("_low", "_high", "_c")] == [0.2, 0.24, 10.0]
    assert (actor["loss_agg_mode"], actor["optim"]["lr"]) == ("token-mean", 1e-6)
    assert (actor["use_kl_loss"], actor["kl_loss_type"]) == (True, "low_var_kl")
    assert actor["kl_loss_coef"] == 0.001 and actor["entropy_coeff"] == 0.0
    assert (trainer["total_epochs"], trainer["test_freq"], trainer["nnodes"]) == (5, 20, 1)
    assert len(data["val_files"]) == 5


def test_reinforce_plus_plus_is_one_override_away(compose):
    config = compose("kk-ar-lopti", "algorithm.adv_estimator=reinforce_plus_plus")
    assert config["algorithm"]["adv_estimator"] == "reinforce_plus_plus"


def test_the_demo_compares_the_published_four_with_three_seeds():
    demo = catalog.load("kk-demo")
    given = {f"kk-{arm.name}": dict(text.split("=") for text in arm.overrides) for arm in demo.arms}
    assert demo.seeds == (1, 2, 3)
    assert {
        name: (
            float(values.get("algorithm.advantage_reweighting.alpha", 0.0)),
            float(values["algorithm.lopti.eta"]) if "algorithm.lopti.enable" in values else None,
        )
        for name, values in given.items()
    } == PUBLISHED


def test_the_demo_is_scored_by_the_reward_that_ships(compose):
    config = compose("kk-demo")
    manager = config["reward_manager"]
    assert (manager["source"], manager["name"]) == ("register", "naive")
    assert config["reward_model"]["reward_kwargs"] == {}
    # Training that ends with its epochs ends without its last validation.
    steps = language.RECIPE.num_train // config["data"]["train_batch_size"]
    assert steps * config["trainer"]["total_epochs"] > config["trainer"]["total_training_steps"]
    # At least two mini-batches, or there is no ratio to clip.
    prompts = config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
    assert config["data"]["train_batch_size"] == 2 * prompts
