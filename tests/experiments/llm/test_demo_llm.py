# SPDX-License-Identifier: Apache-2.0
"""The demo on a pretrained model: fetched, dequantized, trained by verl's real trainer, and its spike traced."""

import json
import os
import subprocess
import sys

import pytest

from tests.experiments.conftest import REPO


@pytest.mark.e2e
@pytest.mark.slow
def test_the_demo_on_a_pretrained_model_names_exactly_the_token_that_it_planted(patched_tree, tmp_path):
    variables = {"PYTHON": sys.executable, "VERL_REPO": str(patched_tree), "RUN_DIR": str(tmp_path / "run")}
    # The fault in the first step, and one after it, which shows that training went on.
    arguments = ["demo-llm", "demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1"]
    done = subprocess.run(
        [str(REPO / "run_experiment.sh"), *arguments],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "FOUND: the event names exactly the token that was planted" in done.stdout
    assert "to go" in done.stdout, "a step says how long the others take"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}
    assert sorted(steps) == [1, 2]
    assert steps[1]["actor/grad_norm"] > 10 * steps[2]["actor/grad_norm"]
    # The rollouts come from the weights being trained.
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in steps.values())
