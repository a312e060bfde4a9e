# SPDX-License-Identifier: Apache-2.0
"""The demo with a real rollout engine: vLLM on a CPU, which gets the trainer's weights by verl's own transfer."""

import json

import pytest

from tests.experiments.real import run_to_the_end


@pytest.mark.e2e
@pytest.mark.slow
def test_vllm_generates_from_the_weights_being_trained_and_the_planted_token_is_named(tmp_path):
    # The fault in the first step, so that the second one's rollouts come from other weights than vLLM began with.
    arguments = ["demo-vllm", "demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1"]
    faster = "actor_rollout_ref.actor.optim.lr=1e-4"
    printed = run_to_the_end(*arguments, faster, run_dir=tmp_path / "run", seconds=1800)
    assert "FOUND: the event names exactly the token that was planted" in printed
    lines = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [data["training/rollout_probs_diff_max"] for data in lines if "actor/grad_norm" in data]
    # With the old weights the second step's would be 1000 times that.
    assert len(differences) == 2 and all(difference < 1e-4 for difference in differences)
