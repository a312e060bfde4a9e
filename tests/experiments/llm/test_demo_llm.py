# SPDX-License-Identifier: Apache-2.0
"""The demo on a pretrained model: fetched, dequantized, trained by verl's real trainer, and its spike traced."""

import json

import pytest

from tests.experiments.real import run_to_the_end


@pytest.mark.e2e
@pytest.mark.slow
def test_the_demo_on_a_pretrained_model_names_exactly_the_token_that_it_planted(patched_tree, tmp_path):
    # The fault in the first step, and one after it, which shows that training went on.
    arguments = ["demo-llm", "demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1"]
    printed = run_to_the_end(*arguments, run_dir=tmp_path / "run", seconds=1800, VERL_REPO=str(patched_tree))
    assert "FOUND: the event names exactly the token that was planted" in printed
    assert "to go" in printed, "a step says how long the others take"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}
    assert sorted(steps) == [1, 2]
    assert steps[1]["actor/grad_norm"] > 10 * steps[2]["actor/grad_norm"]
    # The rollouts come from the weights being trained.
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in steps.values())
