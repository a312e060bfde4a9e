# SPDX-License-Identifier: Apache-2.0
"""A run of TRL's goes by the names that health and the page know, whatever its metrics were logged to."""

import json

import pytest

from gradloc.health.names import known_as
from gradloc.report.runs.run import read_run

LOG = {"grad_norm": 0.5, "reward": 0.25, "entropy": 3.0, "gradloc/spikes": 1.0, "loss": 0.1}


@pytest.mark.parametrize("before", ["", "train/"])
def test_a_trackers_prefix_makes_no_difference(before):
    found = {ours: name for name, ours in known_as([before + name for name in LOG])}
    assert {"actor/grad_norm", "critic/score/mean", "actor/entropy", "actor/pg_loss"} <= found.keys()
    assert ("gradloc/spikes" in found) == bool(before), "it has its name already"


def test_the_newest_checkpoints_state_is_a_runs_metrics(tmp_path):
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{**LOG, "step": number, "grad_norm": float(number)} for number in range(1, step + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    metrics = read_run(tmp_path).metrics
    assert metrics.steps == [1, 2, 3, 4] and metrics.get("actor/grad_norm") == [1.0, 2.0, 3.0, 4.0]
    assert metrics.get("critic/score/mean") == [0.25] * 4
