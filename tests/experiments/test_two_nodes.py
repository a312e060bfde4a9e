# SPDX-License-Identifier: Apache-2.0
"""The demo on a Ray cluster of two nodes with working folders of their own, and resumed on another such cluster."""

import json

import pytest

from experiments.cpu import places
from tests.experiments.real import run_to_the_end


@pytest.mark.e2e
@pytest.mark.slow
def test_on_two_nodes_both_spikes_are_found_and_everything_lies_where_the_docs_say(patched_tree, tmp_path):
    suite_dir = tmp_path / "two nodes"
    printed = run_to_the_end("two-nodes", run_dir=suite_dir, VERL_REPO=str(patched_tree))
    assert printed.count(places.FOUND) == 2
    state = json.loads((suite_dir / "spike" / "checkpoints" / "global_step_3" / "gradloc.json").read_text())
    assert state["spikes"]["num_events"] == 1
    steps = [json.loads(line)["step"] for line in (suite_dir / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [4, 5, 6], "it went on from the checkpoint"
