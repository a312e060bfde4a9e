# SPDX-License-Identifier: Apache-2.0
"""Without a flag, an installed GradLoc is not there; looking on, it changes nothing of the real trainer on Ray."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.experiments import catalog, cli, environment
from lab.experiments.catalog import Experiment
from lab.experiments.launch import end_session
from tests.experiments.conftest import REPO

from .test_localization import PLANT

ACTOR = "actor_rollout_ref.actor"
WITHOUT = ["~gradloc", f"~{ACTOR}.grad_norm_threshold", f"~{ACTOR}.bisect_dump_dir"]
SHORT = ["demo.fault.first_step=2", "demo.fault.last_step=3"]
OF_THE_CLOCK = ("timing", "perf/")
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "stock": (WITHOUT, {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
    "off": (WITHOUT, {}),
    "on": ([], {}),
}
SEEDED = "import random, numpy, torch\nrandom.seed(7); numpy.random.seed(7); torch.manual_seed(7)\n"


def test_without_the_flag_a_run_is_verls_own_also_through_a_spike(train):
    stock, off = train(stock=True, plants=(PLANT,)), train(plants=(PLANT,))
    for one, other in zip(stock, off, strict=True):
        assert one["norms"] == other["norms"]
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    assert not [name for name in off[0]["metrics"] if "gradloc" in name]


def run(experiment: Experiment, overrides: list[str], folder: Path, **variables: str) -> None:
    """One run of verl's own entry point with an experiment's config; its checkpoint and metrics are in the folder."""
    folder.mkdir()
    (folder / "seeded.py").write_text(SEEDED)  # verl leaves the workers' generators unseeded
    material = environment.ensure_material(sys.executable, experiment.material)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    given = {**os.environ, **variables, "VERL_USE_EXTERNAL_MODULES": "seeded", "PYTHONPATH": path}
    environ = given | cli.child_environment(given, experiment, REPO, folder, material)
    command = cli.command(sys.executable, experiment, ["demo.steps=4", "trainer.save_freq=4", *overrides])
    with (folder / "console.log").open("w") as log:
        child = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(900)
        finally:
            end_session(child.pid)
    assert code == 0, (folder / "console.log").read_text()[-4000:]


def metrics(folder: Path) -> dict[tuple[int, str], Any]:
    """All that verl itself has logged, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ours = ("gradloc/", "actor/grad_norm_max")
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line["data"].items()
        if not name.startswith(ours) and not any(part in name for part in OF_THE_CLOCK)
    }


def checkpoint(folder: Path) -> dict[str, Any]:
    """Weights, optimizer state, schedule, random states and the data's place, of all ranks, leaf by leaf."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "checkpoints" / "global_step_4").rglob("*.pt")):
        found.update(leaves(torch.load(path, weights_only=False), str(path.relative_to(folder))))
    return found


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{name}.{number}")
    elif hasattr(value, "local_shards"):
        yield from leaves([shard.tensor for shard in value.local_shards()], name)
    elif isinstance(value, torch.Tensor):
        yield name, (value.to_local() if hasattr(value, "to_local") else value).numpy().tobytes()
    else:
        yield name, value.tobytes() if hasattr(value, "tobytes") else value


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_installed_and_looking_on_it_leaves_the_real_trainer_as_it_is_to_the_bit(tmp_path, strategy):
    for name, (overrides, variables) in RUNS.items():
        chosen = [*SHORT, f"{ACTOR}.strategy={strategy}", *overrides]
        run(catalog.ON_VERL09["demo"], chosen, tmp_path / name, **variables)
    stock = tmp_path / "stock"
    assert len(metrics(stock)) > 200 and len(checkpoint(stock)) > 1000
    for name in ("off", "on"):
        assert metrics(tmp_path / name) == metrics(stock)
        assert checkpoint(tmp_path / name) == checkpoint(stock)
    assert not (tmp_path / "off" / "gradloc").exists()
    (event,) = (tmp_path / "on" / "gradloc" / "events.jsonl").read_text().splitlines()
    planted = json.loads((tmp_path / "on" / "planted.json").read_text())
    (culprit,) = json.loads(event)["culprits"]
    assert (culprit["row"], culprit["positions"]) == (planted["row"], [planted["position"]])
    assert json.loads(event)["certificate"]["verdict"] == "explained"


@pytest.mark.slow
@pytest.mark.e2e
def test_an_analysis_of_a_batch_of_its_own_leaves_the_real_trainer_as_it_is_to_the_bit(tmp_path):
    own = ["trainer.gradient_analysis_env_groups=8", "trainer.gradient_analysis_group_size=4"]
    own.append("trainer.gradient_analysis_every=2")
    without, analysed = tmp_path / "without", tmp_path / "analysed"
    run(catalog.ON_VERL09["buckets-demo"], ["trainer.gradient_analysis_mode=false"], without)
    run(catalog.ON_VERL09["buckets-demo"], own, analysed)
    assert len(metrics(without)) > 200 and len(checkpoint(without)) > 1000
    found, expected = metrics(analysed), metrics(without)
    assert {name: found.get(name) for name in expected} == expected  # beside the analysis's own
    assert checkpoint(analysed) == checkpoint(without)
    for step in (1, 3):
        path = analysed / "gradloc" / "gradient_analysis" / f"step_{step}.json"
        batch = json.loads(path.read_text())["batch"]
        assert (batch["source"], batch["num_groups"], batch["num_rows"]) == ("separate", 8, 32)
