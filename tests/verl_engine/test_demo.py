# SPDX-License-Identifier: Apache-2.0
"""The demo on verl 0.9: its config, and the whole of it with the real trainer on Ray."""

import json
import sys

import pytest

from experiments import catalog
from tests.experiments.conftest import REPO
from tests.experiments.real import run_to_the_end

NAME = catalog.DEMO_VERL09.name
KNOBS = {"GRPO_MAX_GRAD_NORM": "0.25", "GRPO_TEMPERATURE": "0.8", "GRPO_LEARNING_RATE": "3e-6"}


def test_the_demos_config_becomes_verls_dataclasses_and_takes_its_seed_and_knobs(engine_world, tmp_path):
    variables = {"GRADLOC_RUN_DIR": str(tmp_path / "run, dir=1"), "GRADLOC_DEMO_MATERIAL": str(tmp_path / "material")}
    cases = [(NAME, ["seed=7"], KNOBS)]
    # verl keeps `algorithm` as it is written.
    read = {"parts": ("actor_rollout_ref.actor", "actor_rollout_ref.rollout"), "variables": variables}
    ((made,), _) = engine_world.run("configs.experiments", configs=str(catalog.CONFIGS), cases=cases, **read)
    assert "error" not in made, made["error"]
    config = made["config"]
    worker = config["actor_rollout_ref"]
    assert config["demo"]["fault"]["seed"] == config["data"]["seed"] == worker["rollout"]["seed"] == 7
    assert worker["actor"]["gradloc"]["enable"] is True and worker["actor"]["grad_norm_threshold"] == 640.0
    assert worker["actor"]["bisect_dump_dir"] == str(tmp_path / "run, dir=1" / "gradloc")
    assert (worker["actor"]["grad_clip"], worker["actor"]["optim"]["lr"]) == (0.25, 3e-6)
    assert worker["rollout"]["temperature"] == 0.8


@pytest.mark.e2e
def test_the_demo_names_exactly_the_token_that_it_planted(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    run_dir = tmp_path / "a run"
    short = ["demo.steps=3", "demo.fault.first_step=2", "demo.fault.last_step=2"]
    printed = run_to_the_end("demo", "verl=0.9.1", *short, run_dir=run_dir, VERL09_PYTHON=sys.executable)
    assert "FOUND: the event names exactly the token that was planted" in printed
    assert (run_dir / "report.html").is_file()
    schema = json.loads((REPO / "schema" / "event.v1.schema.json").read_text())
    (event,) = (run_dir / "gradloc" / "events.jsonl").read_text().splitlines()
    jsonschema.validate(json.loads(event), schema)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}
    assert sorted(steps) == [1, 2, 3]
    norms = {step: data["actor/grad_norm"] for step, data in steps.items()}
    assert norms[2] > 10 * max(norms[1], norms[3])
    assert [data["gradloc/events"] for data in steps.values()] == [0, 1, 0]
    # The rollouts come from the weights being trained, not from the ones the run began with.
    assert all(data["training/rollout_probs_diff_max"] < 1e-4 for data in steps.values())
