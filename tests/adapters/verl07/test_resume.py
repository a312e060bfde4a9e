# SPDX-License-Identifier: Apache-2.0
"""The real trainer, stopped and resumed with everything on: `pytest -m slow`."""

import json

import pytest

from tests.experiments.real import run_to_the_end

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


def run(folder, patched_tree, *overrides):
    """The metrics of each step."""
    run_to_the_end("demo", *EVERYTHING, *overrides, run_dir=folder, VERL_REPO=str(patched_tree))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}


def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path, patched_tree):
    whole = run(tmp_path / "whole", patched_tree)
    checkpoint = tmp_path / "whole" / "checkpoints" / "global_step_2"
    assert sorted(whole) == [1, 2, 3, 4, 5]
    state = json.loads((checkpoint / "gradloc.json").read_text())
    assert {"spikes", "stabilizers", "health"} <= set(state)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    resumed = run(tmp_path / "resumed", patched_tree, *resume)
    assert sorted(resumed) == [3, 4, 5]
    assert whole[4]["gradloc/events"] == whole[4]["gradloc/mask"] == 1
    for step, metrics in resumed.items():
        for name, value in metrics.items():
            if not name.startswith(("timing", "perf/", "gradloc/seconds")):
                assert value == whole[step][name], (step, name)
    # the schedule advances once a step, though Lopti updates twice
    rates = [whole[step]["actor/lr"] for step in sorted(whole)]
    assert rates == pytest.approx([0, 0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
