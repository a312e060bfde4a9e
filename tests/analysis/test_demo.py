# SPDX-License-Identifier: Apache-2.0
"""The whole way on the real trainer, in minutes: `pytest -m slow tests/analysis/test_demo.py`."""

import json

import pytest

from gradloc.report.cli import main
from tests.experiments.real import run_to_the_end
from tests.world.events import validate

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def run(tmp_path, patched_tree, name, experiment, *overrides):
    folder = tmp_path / name
    run_to_the_end(experiment, *overrides, run_dir=folder, VERL_REPO=str(patched_tree))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return folder, {entry["step"]: entry["data"] for entry in map(json.loads, lines)}


def test_the_demo_is_analysed_at_steps_one_and_five_and_trains_as_if_it_were_not(tmp_path, patched_tree):
    folder, on = run(tmp_path, patched_tree, "on", "buckets-demo")
    analyses = folder / "gradloc" / "gradient_analysis"
    names = ("step_1.json", "step_5.json", "group_rv_table_step_1.csv", "group_rv_table_step_5.csv")
    assert {path.name for path in analyses.iterdir()} == set(names)
    for step in (1, 5):
        record = json.loads((analyses / f"step_{step}.json").read_text())
        validate("gradient_analysis", record)
        assert record["loss"]["terms"] == ["task", "entropy", "kl"]
    _, off = run(tmp_path, patched_tree, "off", "buckets-demo", "trainer.gradient_analysis_mode=False")
    for step in range(1, 6):
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "critic/score/mean"):
            assert on[step][name] == off[step][name]


def test_ppo_with_a_critic_analyses_a_batch_of_its_own_and_ends_before_the_update(tmp_path, patched_tree):
    keys = ("gradient_analysis_env_groups=8", "exit_after_gradient_analysis=True", "save_freq=1")
    folder, metrics = run(tmp_path, patched_tree, "ppo", "buckets-demo-ppo", *(f"trainer.{key}" for key in keys))
    assert list(metrics) == [1]
    assert metrics[1]["trainer/exited_after_gradient_analysis"] == 1.0
    assert metrics[1]["grad_analysis/uses_training_batch"] == 0.0
    assert "actor/grad_norm" not in metrics[1]
    assert not (folder / "checkpoints").exists()


FEWER = ("demo.steps=3", "trainer.quartile_analysis_every=2")


def test_the_demo_by_quartiles_is_analysed_and_trains_as_if_it_were_not(tmp_path, patched_tree, capsys):
    few = "trainer.quartile_analysis_num_tokens=8"
    folder, on = run(tmp_path, patched_tree, "on", "quartiles-demo", *FEWER, few)
    off_key = "trainer.quartile_analysis_mode=False"
    _, off = run(tmp_path, patched_tree, "off", "quartiles-demo", *FEWER, off_key)
    for step in range(1, 4):
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean"):
            assert on[step][name] == off[step][name]
    for step in (1, 3):
        path = folder / "gradloc" / "quartile_analysis" / f"step_{step}.json"
        record = json.loads(path.read_text())
        validate("quartile_analysis", record)
        assert record["closure"] < 1e-5
        assert on[step]["quartile_analysis/closure"] == record["closure"]
    assert main(["quartiles", str(folder), "--output-dir", str(tmp_path / "figures")]) == 0
    assert len(list((tmp_path / "figures").iterdir())) == 2
    assert "Step 3:" in capsys.readouterr().out
