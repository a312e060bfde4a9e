# SPDX-License-Identifier: Apache-2.0
"""The experiments on verl's real trainer, each in its shortest honest form."""

import json

import pytest

from lab.experiments.cpu import places
from tests.experiments.real import demo, explode, largest_difference, run_to_the_end, steps_of
from tests.world.events import read_events

pytestmark = pytest.mark.e2e


def test_the_demo_names_exactly_the_token_that_it_planted(patched_tree, tmp_path):
    run_dir = tmp_path / "a run"
    short = ["demo.steps=3", "demo.fault.first_step=2", "demo.fault.last_step=2"]
    steps = demo("demo", *short, run_dir=run_dir, seconds=420, VERL_REPO=str(patched_tree))
    assert len(steps) == 3 and largest_difference(steps) < 1e-4
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line["step"] for line in lines if "gradloc/verdict" in line["data"]]
    assert found == [2] and len(lines) == 4, "the verdict is a line of its own"


SHORT = ("demo.steps=2", "demo.fault.first_step=1", "demo.fault.last_step=1")


@pytest.mark.slow
def test_the_demo_on_a_pretrained_model_names_exactly_the_token_that_it_planted(patched_tree, tmp_path):
    steps = demo("demo-llm", *SHORT, run_dir=tmp_path / "run", seconds=1800, VERL_REPO=str(patched_tree))
    assert len(steps) == 2 and largest_difference(steps) < 1e-3


@pytest.mark.slow
def test_vllm_generates_from_the_weights_being_trained_and_the_planted_token_is_named(tmp_path):
    """vLLM gets the trainer's weights by verl's own transfer: with the old ones the difference would be 1000 times."""
    faster = "actor_rollout_ref.actor.optim.lr=1e-4"
    printed = run_to_the_end("demo-vllm", *SHORT, faster, run_dir=tmp_path / "run", seconds=1800)
    assert "FOUND: the event names exactly the token that was planted" in printed
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2 and largest_difference(steps) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_where_rollouts_go_on_meanwhile_the_culprit_says_which_weights_sampled_it(ahead, tmp_path):
    later = ("demo.steps=5", "demo.fault.first_step=5", "demo.fault.last_step=5")
    warmed = f"trainer.v1.separate_async.num_warmup_batches={ahead}"
    every = "actor_rollout_ref.actor.gradloc.mismatch.every=1"
    printed = run_to_the_end("demo-async", *later, warmed, every, run_dir=tmp_path / "run", seconds=600)
    assert "FOUND: the event names exactly the token that was planted" in printed
    (event,) = read_events(tmp_path / "run" / "gradloc")
    (culprit,) = event["culprits"]
    staleness = "training/off_policy/trajectory_staleness/max"
    assert event["step"]["global_step"] - 1 - culprit["versions"][1] <= steps_of(tmp_path / "run")[-1][staleness]
    assert steps_of(tmp_path / "run")[-1][staleness] == ahead
    lines = (tmp_path / "run" / "gradloc" / "mismatch.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[0] == "noise" and set(kinds) <= {"noise", "stale", "cannot tell"}
    assert ("stale" in kinds) == (ahead > 0), kinds


@pytest.mark.slow
def test_the_stale_token_explodes_is_named_and_is_compared_with_the_healthy_twin(patched_tree, tmp_path):
    explode(tmp_path / "suite", VERL_REPO=str(patched_tree))


@pytest.mark.slow
def test_on_two_nodes_both_spikes_are_found_and_every_file_is_where_the_docs_say(patched_tree, tmp_path):
    suite_dir = tmp_path / "two nodes"
    printed = run_to_the_end("two-nodes", run_dir=suite_dir, VERL_REPO=str(patched_tree))
    assert printed.count(places.FOUND) == 2
    state = json.loads((suite_dir / "spike" / "checkpoints" / "global_step_3" / "gradloc.json").read_text())
    assert state["spikes"]["num_events"] == 1
    steps = [json.loads(line)["step"] for line in (suite_dir / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [4, 5, 6], "it went on from the checkpoint"


@pytest.mark.slow
def test_knights_and_knaves_run_an_arm_and_end_in_a_table_and_a_plot(patched_tree, tmp_path):
    pytest.importorskip("ray")
    run_dir = tmp_path / "runs"
    arguments = ["--arms", "ar-lopti", "--seeds", "1", "demo.steps=2"]
    run_to_the_end("kk-demo", *arguments, run_dir=run_dir, VERL_REPO=str(patched_tree))
    assert "| ar-lopti | 1 |" in (run_dir / "summary.md").read_text()
    assert (run_dir / "summary.png").is_file()
    steps = steps_of(run_dir / "ar-lopti-seed1")
    for step in steps:
        assert -3 <= step["critic/score/mean"] <= 3
        assert step["lopti/low/share"] + step["lopti/high/share"] == pytest.approx(1)
        assert 0.7 < step["advantage_reweighting/kept_share"] <= 1
    kinds = ("acc", "wrong_answer", "format_error")
    final = {key.split("/")[2]: v for key, v in steps[-1].items() if "/mean@4" in key}
    assert sum(final[kind] for kind in kinds) == pytest.approx(1)


@pytest.mark.slow
def test_an_arm_of_wild_runs_in_the_real_trainer_and_ends_with_its_row(patched_tree, tmp_path):
    arguments = ["wild", "--arms", "reward-error", "--seeds", "1", "demo.steps=1"]
    run_to_the_end(*arguments, run_dir=tmp_path / "wild", seconds=1800, VERL_REPO=str(patched_tree))
    (line,) = (tmp_path / "wild" / "summary.md").read_text().splitlines()[2:]
    assert line.startswith("| reward-error | 1 | 1 |")
