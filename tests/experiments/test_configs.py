# SPDX-License-Identifier: Apache-2.0
"""Every experiment's config composes against the patched tree and becomes verl's dataclasses."""

import json
import os
import re
import subprocess
import sys

import pytest

from experiments import catalog
from tests.experiments.conftest import REPO

pytest.importorskip("hydra")

COMPOSE = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

name, configs, *overrides = sys.argv[1:]
searchpath = "hydra.searchpath=[pkg://verl.trainer.config]"
with initialize_config_dir(configs, version_base=None):
    config = compose(name, overrides=[*overrides, searchpath])
OmegaConf.resolve(config)
actor = config.actor_rollout_ref
# Not `ref` and `reward_manager`: even verl's own defaults of these do not become dataclasses.
built = {
    "actor": omega_conf_to_dataclass(actor.actor),
    "rollout": omega_conf_to_dataclass(actor.rollout),
    "algorithm": omega_conf_to_dataclass(config.algorithm),
}
validate_config(config, use_reference_policy=False, use_critic=False)
print(json.dumps({"config": OmegaConf.to_container(config), "built": sorted(built)}))
"""


def environment(tmp_path, tree):
    """What cli.py and a user set, as far as the configs read it."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(REPO)]),
        "GRADLOC_RUN_DIR": str(tmp_path / "run, dir=1"),
        "GRADLOC_DEMO_MATERIAL": str(tmp_path / "material"),
        "VERL_USE_EXTERNAL_MODULES": "experiments.metrics_file",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
        "MODEL_PATH": str(tmp_path / "model $x"),
        "TRAIN_FILE": str(tmp_path / "train.parquet"),
        "CKPTS_DIR": str(tmp_path / "ckpts"),
    }


def compose(tmp_path, tree, name, *overrides, **variables):
    command = [sys.executable, "-c", COMPOSE, name, str(catalog.CONFIGS), *overrides]
    environ = {**environment(tmp_path, tree), **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["config"]


@pytest.fixture(scope="module", params=catalog.names())
def composed(request, tmp_path_factory, patched_tree):
    """Each experiment's name and composed config."""
    folder = tmp_path_factory.mktemp("composed")
    return request.param, folder, compose(folder, patched_tree, request.param)


def test_an_experiment_composes_and_becomes_verls_dataclasses(composed):
    name, folder, config = composed
    assert config["trainer"]["experiment_name"] == name
    assert str(folder) in config["data"]["train_files"]


def test_the_published_knobs_have_the_published_values(composed):
    name, _, config = composed
    if name not in (catalog.DEMO, catalog.PUBLISHED):
        pytest.skip("about the demo and the published experiment")
    actor = config["actor_rollout_ref"]["actor"]
    assert actor["spike_detection"] is True
    assert actor["grad_norm_threshold"] == 640.0
    assert actor["bisect_budget_steps"] == 128


def test_the_published_sizes_are_the_defaults(composed):
    name, folder, config = composed
    if name != catalog.PUBLISHED:
        pytest.skip("about the published experiment")
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
    assert worker["actor"]["bisect_dump_dir"] == str(folder / "ckpts" / "bisect_dump")


def test_a_size_can_be_set_by_its_variable_and_by_an_override(tmp_path, patched_tree):
    config = compose(
        tmp_path, patched_tree, catalog.PUBLISHED, "data.train_batch_size=32", NNODES="2"
    )
    assert config["data"]["train_batch_size"] == 32 and config["trainer"]["nnodes"] == 2


def test_the_demos_seed_reaches_the_fault_the_data_and_the_rollouts(tmp_path, patched_tree):
    config = compose(tmp_path, patched_tree, catalog.DEMO, "seed=7")
    settings = config["reward_model"]["reward_kwargs"]["fault_settings"]
    assert settings["seed"] == config["data"]["seed"] == config["seed"] == 7
    assert settings["record"].endswith("run, dir=1/planted.json")
    assert settings["last_step"] < config["trainer"]["total_training_steps"] >= 8


@pytest.mark.parametrize("name", catalog.names())
def test_what_a_config_takes_from_the_environment_is_what_its_head_says(name):
    text = (catalog.CONFIGS / f"{name}.yaml").read_text()
    used = set(re.findall(r"\$\{oc\.env:([A-Z_]+)\}", text))
    provided = {
        "GRADLOC_RUN_DIR",
        "GRADLOC_DEMO_MATERIAL",
        "PYTHONPATH",
        "VERL_USE_EXTERNAL_MODULES",
        "VERL_FILE_LOGGER_PATH",
    }
    assert used - provided <= {variable.name for variable in catalog.load(name).variables}


@pytest.mark.parametrize("name", catalog.names())
def test_every_variable_of_an_experiment_is_documented(name):
    documented = (REPO / "docs" / "experiments.md").read_text()
    text = (catalog.CONFIGS / f"{name}.yaml").read_text()
    for variable in set(re.findall(r"oc\.env:([A-Z_]+)", text)):
        assert f"`{variable}`" in documented, variable
