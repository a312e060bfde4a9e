# SPDX-License-Identifier: Apache-2.0
"""The demo on a pretrained model: fetched, dequantized, trained by verl's real trainer; and with vLLM on a CPU."""

import pytest

from tests.experiments.real import demo, largest_difference, run_to_the_end, steps_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SHORT = ("demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1")


def test_the_demo_on_a_pretrained_model_names_exactly_the_token_that_it_planted(patched_tree, tmp_path):
    steps = demo("demo-llm", *SHORT, run_dir=tmp_path / "run", seconds=1800, VERL_REPO=str(patched_tree))
    assert len(steps) == 2 and largest_difference(steps) < 1e-3


def test_vllm_generates_from_the_weights_being_trained_and_the_planted_token_is_named(tmp_path):
    """vLLM gets the trainer's weights by verl's own transfer: with the old ones the difference would be 1000 times."""
    faster = "actor_rollout_ref.actor.optim.lr=1e-4"
    printed = run_to_the_end("demo-vllm", *SHORT, faster, run_dir=tmp_path / "run", seconds=1800)
    assert "FOUND: the event names exactly the token that was planted" in printed
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 and largest_difference(steps) < 1e-4
