# SPDX-License-Identifier: Apache-2.0
"""Metrics come from verl's file logger, a CSV, or TensorBoard, and mean the same."""

import json
import math

import pytest

from gradloc.report.runs.metrics import MAX, MEAN, read
from gradloc.report.runs.run import read_run
from tests.report.builder import make_event, make_metrics, write_run


def test_jsonl_of_verls_file_logger_is_read(tmp_path):
    write_run(tmp_path, metrics=make_metrics(3, ()))
    metrics, notes = read(tmp_path / "metrics.jsonl")
    assert metrics.steps == [1, 2, 3]
    assert len(metrics.finite(MEAN)) == len(metrics.finite(MAX)) == 3
    assert notes == []


def test_pythons_own_nan_and_values_that_are_no_numbers_are_no_obstacle(tmp_path):
    path = tmp_path / "m.jsonl"
    data = {MEAN: float("nan"), "text": "word", "list": [1], "flag": True, "number": "2.5"}
    path.write_text(json.dumps({"step": 1, "data": data}) + "\n")
    metrics, _ = read(path)
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


def test_a_cut_off_last_line_of_metrics_is_a_note(tmp_path):
    write_run(tmp_path, metrics=make_metrics(3, ()))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    metrics, notes = read(path)
    assert metrics.steps == [1, 2]
    assert notes == ["Line 3 of metrics.jsonl is cut off and was left out."]


def test_a_step_logged_twice_keeps_the_later_value(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)]
    path.write_text("".join(json.dumps({"step": s, "data": {MEAN: v}}) + "\n" for s, v in rows))
    metrics, _ = read(path)
    assert metrics.steps == [1, 2, 3]
    assert metrics.get(MEAN) == [1.0, 20.0, 3.0]


@pytest.mark.parametrize(
    ("header", "name"),
    [(f"step,{MEAN}", MEAN), (f"Step,my-run - {MEAN},my-run - {MEAN}__MIN", MEAN)],
    ids=["plain", "wandb export"],
)
def test_a_csv_is_read(tmp_path, header, name):
    path = tmp_path / "export.csv"
    path.write_text(header + "\n1,0.5,0.5\n2,,\n3,inf,0\n")
    metrics, notes = read(path)
    assert metrics.steps == [1, 2, 3]
    assert metrics.get(name) == [0.5, None, math.inf]
    assert notes == []


def test_a_csv_without_steps_says_so(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text("a,b\n1,2\n")
    metrics, notes = read(path)
    assert not metrics
    assert notes == ["export.csv has no step column and was left out."]


def test_tensorboard_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    import sys

    for module in ("tensorboard", "tensorboard.backend.event_processing.event_accumulator"):
        monkeypatch.setitem(sys.modules, module, None)
    write_run(tmp_path, [make_event()])
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1.host").write_bytes(b"")
    run = read_run(tmp_path)
    assert any("pip install tensorboard" in note for note in run.notes)
    assert len(run.events) == 1


def test_metrics_elsewhere_can_be_named(tmp_path):
    folder = write_run(tmp_path / "run", [make_event()])
    write_run(tmp_path / "logs", metrics=make_metrics(4, ()))
    assert read_run(folder, tmp_path / "logs" / "metrics.jsonl").metrics.steps == [1, 2, 3, 4]


def test_tensorboard_files_are_read_where_its_package_is(tmp_path):
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer", reason="tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    folder = tmp_path / "run" / "tensorboard_log"
    writer = writers.EventFileWriter(str(folder))
    for step in (1, 2, 3):
        value = Summary.Value(tag=MEAN, simple_value=float(step))
        writer.add_event(Event(wall_time=0.0, step=step, summary=Summary(value=[value])))
    writer.close()
    write_run(tmp_path / "run", [make_event()])
    metrics = read_run(tmp_path / "run").metrics
    assert metrics.steps == [1, 2, 3]
    assert metrics.get(MEAN) == [1.0, 2.0, 3.0]
