# SPDX-License-Identifier: Apache-2.0
"""The real trainer, stopped and resumed with everything on: `pytest -m slow`."""

import json
import os
import subprocess
import sys

import pytest

from tests.world import REPO

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ACTOR = "actor_rollout_ref.actor"
STABILIZE = f"{ACTOR}.gradloc.stabilize"
EVERYTHING = [
    "demo.steps=5",
    "demo.fault.first_step=4",
    "demo.fault.last_step=4",
    f"{ACTOR}.gradloc.action.mode=mask",
    f"{ACTOR}.optim.lr_warmup_steps=4",
    "algorithm.advantage_reweighting.alpha=0.2",
    "algorithm.lopti.enable=true",
    "algorithm.lopti.quantile=0.5",
    f"{STABILIZE}.token_clip.mode=mask",
    f"{STABILIZE}.seq_clip.mode=clamp",
    f"{STABILIZE}.layer_clip.rule=adagc",
    f"{STABILIZE}.layer_clip.warmup=2",
    f"{STABILIZE}.skip_step.enable=true",
    "trainer.health.enable=true",
    "trainer.save_freq=2",
]


def run(tmp_path, patched_tree, name, *overrides):
    folder = tmp_path / name
    environ = {"VERL_REPO": str(patched_tree), "RUN_DIR": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(REPO / "run_experiment.sh"), "demo", *EVERYTHING, *overrides],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = {entry["step"]: entry["data"] for entry in map(json.loads, lines)}
    return folder, steps, done.stdout + done.stderr


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path, patched_tree):
    folder, whole, said = run(tmp_path, patched_tree, "whole")
    checkpoint = folder / "checkpoints" / "global_step_2"
    assert sorted(whole) == [1, 2, 3, 4, 5], said
    state = json.loads((checkpoint / "gradloc.json").read_text())
    assert {"spikes", "stabilizers", "health"} <= set(state)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    _, resumed, said = run(tmp_path, patched_tree, "resumed", *resume)
    assert sorted(resumed) == [3, 4, 5], said
    assert whole[4]["gradloc/events"] == whole[4]["gradloc/mask"] == 1
    for step, metrics in resumed.items():
        for name, value in metrics.items():
            if not name.startswith(("timing", "perf/", "gradloc/seconds")):
                assert value == whole[step][name], (step, name)
    # the schedule advances once a step, though Lopti updates twice
    rates = [whole[step]["actor/lr"] for step in sorted(whole)]
    assert rates == pytest.approx([0, 0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
