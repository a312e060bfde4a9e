# SPDX-License-Identifier: Apache-2.0
"""Restarts, resumes and runs beside each other are told apart, and every value that was logged is in some segment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc.report.logs.recording import MEAN, Recording
from gradloc.report.logs.segments import runs_of, split


def recording(*spans, source="a.log", run=""):
    """Rows over spans of steps; every value is its own."""
    steps = [step for first, last in spans for step in range(first, last + 1)]
    return Recording(source, "x", run, rows=[(step, {MEAN: 1.0 + at / 1000}) for at, step in enumerate(steps)])


def spans(run):
    return [(segment.first, segment.last) for segment in run.segments]


def test_a_resumed_run_is_one_run_whose_end_was_logged_last():
    (run,) = runs_of([[recording((1, 87), (81, 120))]])
    assert spans(run) == [(1, 87), (81, 120)]
    assert run.segments[1].before is run.segments[0]
    assert run.metrics.steps == list(range(1, 121))
    assert run.metrics.get(MEAN)[80] == 1.0 + 87 / 1000, "step 81 as it was logged last"
    ((segment, lost),) = run.overwritten
    assert segment is run.segments[0] and lost == list(range(81, 88))


def test_a_run_that_was_resumed_twice_from_before_the_first_resume_keeps_what_led_to_its_end():
    (run,) = runs_of([[recording((1, 50), (41, 60), (31, 80))]])
    assert run.segments[2].before is run.segments[0]
    assert run.metrics.steps == list(range(1, 81))
    assert [(segment.first, lost[0], lost[-1]) for segment, lost in run.overwritten] == [(1, 31, 50), (41, 41, 60)]


def test_a_run_that_begins_again_is_another_run():
    first, second = runs_of([[recording((1, 20), (1, 30))]])
    assert spans(first) == [(1, 20)] and spans(second) == [(1, 30)]
    assert second.name == "a.log, start 2" and not first.overwritten


@pytest.mark.parametrize(
    ("second", "count"),
    [((31, 80), 1), ((51, 80), 1), ((1, 80), 2), ((3, 80), 2), ((31, 40), 2)],
    ids=["resumed", "continued", "begun again", "begun a little later", "shorter"],
)
def test_another_file_goes_on_from_the_first_where_it_begins_well_after_it_and_goes_further(second, count):
    runs = runs_of([[recording((1, 50)), recording(second, source="b.log")]])
    assert len(runs) == count


def test_a_metric_that_comes_late_is_no_resume():
    rows = [(1, {MEAN: 1.0}), (2, {MEAN: 1.0}), (1, {"val/acc": 0.5}), (3, {MEAN: 1.0}), (3, {"val/acc": 0.6})]
    parts, notes = split(rows, "x")
    assert parts == [{1: {MEAN: 1.0, "val/acc": 0.5}, 2: {MEAN: 1.0}, 3: {MEAN: 1.0, "val/acc": 0.6}}] and not notes


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=60))
def test_no_value_is_lost(logged):
    rows = [(step, {name: float(value)}) for step, name, value in logged]
    parts, notes = split([(step, dict(values)) for step, values in rows], "x")
    if any("several rows" in note for note in notes):
        return
    kept = {(step, name, value) for part in parts for step, row in part.items() for name, value in row.items()}
    assert kept == {(step, name, float(value)) for step, name, value in logged}
