# SPDX-License-Identifier: Apache-2.0
"""A run's metrics, and where in its folder they are found."""

import json
import math

from gradloc.report.logs.recording import MEAN
from gradloc.report.runs.run import read_run
from tests.report.builder import make_event, make_metrics, write_run


def test_pythons_own_nan_and_values_that_are_no_numbers_are_no_obstacle(tmp_path):
    data = {MEAN: float("nan"), "text": "word", "list": [1], "flag": True, "number": "2.5"}
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    metrics = read_run(tmp_path).metrics
    assert math.isnan(metrics.get(MEAN)[0])
    assert metrics.finite(MEAN) == []
    assert set(metrics.series) == {MEAN, "number"}


def test_the_verdict_s_own_line_is_no_step_and_tells_of_events_that_are_elsewhere(tmp_path):
    rows = make_metrics(6)
    told = {"gradloc/verdict": ["At step 5 the gradient norm was 748."], "gradloc/culprits": [{"token": " is"}]}
    write_run(tmp_path, metrics=[*rows[:4], {"step": 5, "data": told}, *rows[4:]])
    run = read_run(tmp_path)
    assert run.metrics.steps == [1, 2, 3, 4, 5, 6] and run.metrics.get(MEAN)[4] == 100.0
    assert run.notes[0].startswith("metrics.jsonl tells of 1 event whose folder is not here")
    assert run.notes[1] == told["gradloc/verdict"][0]
    write_run(tmp_path, [make_event()])
    assert [note for note in read_run(tmp_path).notes if "tells of" in note] == []


def test_metrics_elsewhere_can_be_named(tmp_path):
    folder = write_run(tmp_path / "run", [make_event()])
    write_run(tmp_path / "logs", metrics=make_metrics(4, ()))
    assert read_run(folder, tmp_path / "logs" / "metrics.jsonl").metrics.steps == [1, 2, 3, 4]
