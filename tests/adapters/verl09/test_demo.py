# SPDX-License-Identifier: Apache-2.0
"""The experiments on verl 0.9: their configs, and the whole demo with the real trainer on Ray."""

import sys

import pytest

from lab.experiments import catalog
from lab.experiments.errors import UsageError
from lab.rewards import kk as kk_reward
from tests.experiments.conftest import composer
from tests.experiments.real import demo, explode, largest_difference

NAME = catalog.ON_VERL09["demo"].name
KNOBS = {"GRPO_MAX_GRAD_NORM": "0.25", "GRPO_TEMPERATURE": "0.8", "GRPO_LEARNING_RATE": "3e-6"}

MEGATRON = "model_engine=megatron"

EXPLOSION = catalog.ON_VERL09["explosion"]
EXPLOSION_KNOBS = {**KNOBS, "RUNAWAY_PENALTY_MULTIPLIER": "0.4"}


@pytest.fixture(scope="module")
def composed(single, tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed")
    given = dict.fromkeys(("GRADLOC_DEMO_MATERIAL", "MODEL_PATH", "TRAIN_FILE", "KK_DATA"), "given")
    given |= {"GRADLOC_RUN_DIR": "run, dir=1", "CKPTS_DIR": "ckpts"}
    variables = {name: str(folder / value) for name, value in given.items()}
    variables |= dict.fromkeys(("PYTHONPATH", "VERL_USE_EXTERNAL_MODULES", "VERL_FILE_LOGGER_PATH"), "set")
    # verl keeps `algorithm` as it is written.
    return composer(single, folder, variables, parts=("actor_rollout_ref.actor", "actor_rollout_ref.rollout"))


def test_the_demos_config_becomes_verls_dataclasses_and_takes_its_seed_and_knobs(composed):
    config = composed(NAME, ["seed=7"], KNOBS)
    worker = config["actor_rollout_ref"]
    assert config["demo"]["fault"]["seed"] == config["data"]["seed"] == worker["rollout"]["seed"] == 7
    assert worker["actor"]["gradloc"]["enable"] is True and worker["actor"]["grad_norm_threshold"] == 640.0
    assert worker["actor"]["bisect_dump_dir"] == str(composed.folder / "run, dir=1" / "gradloc")
    assert (worker["actor"]["optim"]["clip_grad"], worker["actor"]["optim"]["lr"]) == (0.25, 3e-6)
    assert worker["rollout"]["temperature"] == 0.8


def test_the_demo_is_megatrons_where_that_is_asked_for(composed):
    actor = composed(NAME, [MEGATRON])["actor_rollout_ref"]["actor"]
    assert actor["strategy"] == "megatron" and actor["megatron"]["tensor_model_parallel_size"] == 2
    assert "fsdp_config" not in actor and actor["gradloc"]["enable"] is True


def test_the_published_experiment_has_its_knobs_on_this_verl(composed):
    config = composed(f"{catalog.PUBLISHED.name}-verl09")
    actor = config["actor_rollout_ref"]["actor"]
    assert (actor["spike_detection"], actor["grad_norm_threshold"], actor["bisect_budget_steps"]) == (True, 640.0, 128)
    assert actor["_target_"].startswith("gradloc.") and actor["bisect_dump_dir"].endswith("/ckpts/bisect_dump")
    assert config["data"]["max_response_length"] == 16384 and actor["optim"]["lr"] == 3e-6


@pytest.mark.parametrize("name, alpha", [("kk-baseline-verl09", None), ("kk-ar-verl09", 0.2)])
def test_knights_and_knaves_has_its_reward_and_looks_for_no_spikes(composed, name, alpha):
    config = composed(name)
    assert config["reward"]["custom_reward_function"]["path"] == "pkg://lab.rewards.kk"
    assert config["algorithm"].get("advantage_reweighting", {}).get("alpha") == alpha
    assert not config["actor_rollout_ref"]["actor"].get("gradloc", {}).get("enable")
    assert kk_reward.score("kk_logic3", "nothing", {"solution_text_format": "(1) Zoey is a knight"})["score"] == -3.0


def test_what_needs_the_patch_is_refused_on_this_verl():
    with pytest.raises(UsageError, match="wild runs on verl 0.7.0, not on 0.9.1"):
        catalog.form_for(catalog.load("wild"), "0.9.1", "verl")


def test_what_would_limit_the_explosion_is_off_and_its_knobs_reach_verl(composed):
    config = composed(EXPLOSION.name, (), EXPLOSION_KNOBS)
    worker = config["actor_rollout_ref"]
    assert (worker["actor"]["optim"]["clip_grad"], worker["actor"]["optim"]["lr"]) == (0.25, 3e-6)
    assert worker["rollout"]["temperature"] == 0.8 and config["knobs"]["runaway_penalty"] == 0.4
    assert {worker["actor"][f"clip_ratio{which}"] for which in ("", "_low", "_high", "_c")} == {1e9}
    given = worker["rollout"]["engine_kwargs"]["hf_cpu"]
    assert given["planted_steps"] == [7, 8] and given["batch"] == 64
    assert composed(EXPLOSION.name)["actor_rollout_ref"]["actor"]["optim"]["clip_grad"] == 1e9


@pytest.mark.slow
@pytest.mark.parametrize("arm", [arm for arm in EXPLOSION.arms if arm.overrides], ids=lambda arm: arm.name)
def test_every_arm_of_the_explosion_composes(composed, arm):
    actor = composed(EXPLOSION.name, arm.overrides)["actor_rollout_ref"]["actor"]
    assert actor["gradloc"]["enable"] is True
    assert (actor["gradloc"]["stabilize"]["layer_clip"]["rule"] == "zscore") == (arm.name == "safe")


@pytest.mark.e2e
@pytest.mark.slow
def test_the_stale_token_explodes_is_named_and_is_compared_with_the_healthy_twin(tmp_path):
    explode(tmp_path / "suite", "verl=0.9.1", VERL09_PYTHON=sys.executable)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["dp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_the_demo_names_exactly_the_token_that_it_planted(tmp_path, engine):
    short = [f"model_engine={engine}", "demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1"]
    steps = demo("demo", "verl=0.9.1", *short, run_dir=tmp_path / "a run", VERL09_PYTHON=sys.executable)
    assert len(steps) == 2 and largest_difference(steps) < 1e-4
