# SPDX-License-Identifier: Apache-2.0
"""Every experiment's config composes against the patched tree and becomes verl's dataclasses."""

import os

import pytest

from lab.experiments import catalog
from lab.experiments.catalog import Arm
from tests.experiments.conftest import REPO, composer

pytest.importorskip("hydra")


def environment(tmp_path, tree):
    """The variables that cli.py and a user set, as far as the configs read them."""
    return {
        "PYTHONPATH": os.pathsep.join([str(tree), str(REPO)]),
        "GRADLOC_RUN_DIR": str(tmp_path / "run, dir=1"),
        "GRADLOC_DEMO_MATERIAL": str(tmp_path / "material"),
        "VERL_USE_EXTERNAL_MODULES": "lab.experiments.metrics_file",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "MODEL_PATH": str(tmp_path / "model $x"),
        "TRAIN_FILE": str(tmp_path / "train.parquet"),
        "CKPTS_DIR": str(tmp_path / "ckpts"),
        "KK_DATA": str(tmp_path / "knights"),
    }


KNOBS = {
    "GRPO_MAX_GRAD_NORM": "0.25",
    "GRPO_TEMPERATURE": "0.8",
    "GRPO_LEARNING_RATE": "3e-6",
    "RUNAWAY_PENALTY_MULTIPLIER": "0.4",
}
# tests/adapters/verl09 composes the others.
PATCHED = [name for name in catalog.EXPERIMENTS if not (catalog.load(name).is_installed or catalog.load(name).script)]
REINFORCE = ("algorithm.adv_estimator=reinforce_plus_plus",)
# alpha, eta (None: no Lopti), from the four scripts of the authors' repository.
KNIGHTS = {"kk-baseline": (0.0, None), "kk-ar": (0.2, None), "kk-lopti": (0.0, 0.4), "kk-ar-lopti": (0.3, 0.5)}
KNOBBED = ["demo", "explosion", "buckets-demo"]


def runs():
    """Every experiment as it is, and with each arm; those of KNOBBED and KNIGHTS are composed by the tests below."""
    for name in PATCHED:
        others = [pytest.mark.slow] * (name in (*KNOBBED, *KNIGHTS, "kk-demo", catalog.PUBLISHED.name))
        yield pytest.param(name, Arm("as it is", ""), id=name, marks=others)
        for arm in catalog.load(name).arms:
            yield pytest.param(name, arm, id=f"{name}: {arm.name}", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def composed(single, tmp_path_factory, patched_tree):
    folder = tmp_path_factory.mktemp("composed")
    return composer(single, folder, environment(folder, patched_tree))


@pytest.mark.parametrize(("name", "arm"), [*runs()])
def test_every_arm_of_an_experiment_composes_and_becomes_verls_dataclasses(composed, name, arm):
    config = composed(name, arm.overrides)
    assert str(composed.folder) in config["data"]["train_files"]


@pytest.mark.parametrize("experiment", [catalog.DEMO, catalog.PUBLISHED], ids=lambda found: found.name)
def test_the_published_knobs_have_the_published_values(composed, experiment):
    actor = composed(experiment.name)["actor_rollout_ref"]["actor"]
    assert actor["spike_detection"] is True
    assert actor["grad_norm_threshold"] == 640.0
    assert actor["bisect_budget_steps"] == 128


def test_the_published_sizes_are_the_defaults(composed):
    config = composed(catalog.PUBLISHED.name)
    data, worker, trainer = config["data"], config["actor_rollout_ref"], config["trainer"]
    assert (data["train_batch_size"], worker["rollout"]["n"]) == (64, 8)
    assert (data["max_prompt_length"], data["max_response_length"]) == (2048, 16384)
    assert worker["actor"]["ppo_mini_batch_size"] == 8
    assert worker["actor"]["ppo_micro_batch_size_per_gpu"] == 1
    assert worker["actor"]["optim"]["lr"] == 3e-6
    assert worker["actor"]["strategy"] == "fsdp"
    assert worker["rollout"]["name"] == "vllm"
    assert worker["rollout"]["tensor_model_parallel_size"] == 4
    assert (trainer["nnodes"], trainer["n_gpus_per_node"]) == (8, 8)
    assert config["algorithm"]["kl_ctrl"]["kl_coef"] == 0.0
    assert worker["actor"]["bisect_dump_dir"] == str(composed.folder / "ckpts" / "bisect_dump")


def test_a_size_can_be_set_by_its_variable_and_by_an_override(composed):
    config = composed(catalog.PUBLISHED.name, ["data.train_batch_size=32"], {"NNODES": "2"})
    assert config["data"]["train_batch_size"] == 32 and config["trainer"]["nnodes"] == 2


def test_the_demos_seed_reaches_the_fault_the_data_and_the_rollouts(composed):
    config = composed(catalog.DEMO.name, ["seed=7"])
    settings = config["reward_model"]["reward_kwargs"]["fault_settings"]
    assert settings["seed"] == config["data"]["seed"] == config["seed"] == 7
    assert settings["record"].endswith("run, dir=1/planted.json")
    assert settings["last_step"] < config["trainer"]["total_training_steps"] >= 8


def knobs_of(config):
    """The four values in the order of `KNOBS`."""
    worker = config["actor_rollout_ref"]
    return (
        worker["actor"]["grad_clip"],
        worker["rollout"]["temperature"],
        worker["actor"]["optim"]["lr"],
        config["reward_model"]["reward_kwargs"]["runaway_penalty"],
    )


def test_the_post_mortems_variables_reach_verls_config(composed):
    found = [composed(name, (), KNOBS) for name in KNOBBED]
    assert [knobs_of(config) for config in found] == [(0.25, 0.8, 3e-6, 0.4)] * 3


def test_without_the_variables_the_values_are_the_documented_ones(composed):
    demo, explosion = composed("demo"), composed("explosion")
    assert knobs_of(demo) == (1.0, 1.0, 1e-4, 1.0)
    assert knobs_of(explosion) == (1e9, 1.0, 4e-4, 0.3)
    worker = explosion["actor_rollout_ref"]["actor"]
    # Whatever would limit the ratio is switched off.
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        assert worker[key] == 1e9
    # With one mini-batch verl takes the present log-probs for the old ones.
    assert explosion["data"]["train_batch_size"] >= 2 * worker["ppo_mini_batch_size"]
    planted = explosion["explosion"]
    assert (planted["old_probability"], planted["advantage"]) == (1e-5, 0.8)
    assert explosion["data"]["max_response_length"] == 200
    assert planted["spike_step"] + 5 < explosion["trainer"]["total_training_steps"]


@pytest.mark.parametrize("name", KNIGHTS)
def test_knights_and_knaves_have_the_published_values(composed, name):
    config = composed(name)
    alpha, eta = KNIGHTS[name]
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


def test_reinforce_plus_plus_is_one_override_away(composed):
    config = composed("kk-ar-lopti", REINFORCE)
    assert config["algorithm"]["adv_estimator"] == "reinforce_plus_plus"


def test_knights_and_knaves_demo_compares_the_published_four_with_three_seeds():
    demo = catalog.load("kk-demo")
    given = {f"kk-{arm.name}": dict(text.split("=") for text in arm.overrides) for arm in demo.arms}
    assert demo.seeds == (1, 2, 3)
    assert {
        name: (
            float(values.get("algorithm.advantage_reweighting.alpha", 0.0)),
            float(values["algorithm.lopti.eta"]) if "algorithm.lopti.enable" in values else None,
        )
        for name, values in given.items()
    } == KNIGHTS


def test_knights_and_knaves_demo_is_scored_by_the_reward_that_ships(composed):
    from lab.experiments.kk import language

    config = composed("kk-demo")
    manager = config["reward_manager"]
    assert (manager["source"], manager["name"]) == ("register", "naive")
    assert config["reward_model"]["reward_kwargs"] == {}
    # Training that ends with its epochs ends without its last validation.
    steps = language.RECIPE.num_train // config["data"]["train_batch_size"]
    assert steps * config["trainer"]["total_epochs"] > config["trainer"]["total_training_steps"]
    # At least two mini-batches, or there is no ratio to clip.
    prompts = config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"]
    assert config["data"]["train_batch_size"] == 2 * prompts
