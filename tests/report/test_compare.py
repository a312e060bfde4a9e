# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: what each has, and where their spikes meet."""

from gradloc.report.runs.comparison import compare
from gradloc.report.runs.run import read_run
from tests.report.builder import make_event, make_metrics, write_run


def test_two_runs_are_put_side_by_side(tmp_path):
    first = read_run(write_run(tmp_path / "a", [make_event(5)], metrics=make_metrics()))
    second = read_run(write_run(tmp_path / "b", metrics=make_metrics(10, ())))
    found = compare(first, second)
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["steps"] == ["20", "10"]
    assert rows["events"] == ["1", "0"]
    assert rows["causes"] == ["extreme advantage 1", "–"]
    assert rows["gradient norm, largest"][0] == "747"
    assert found.steps == [["5", "747.7 ( is)", "–"]]


def test_two_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [read_run(write_run(tmp_path / name, [make_event(5)])) for name in "ab"]
    assert compare(*runs).names == ["tests / report (a)", "tests / report (b)"]
    assert compare(runs[0], runs[0]).names == ["tests / report (first)", "tests / report (second)"]
