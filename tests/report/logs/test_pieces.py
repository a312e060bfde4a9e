# SPDX-License-Identifier: Apache-2.0
"""Of a piece of a log the right steps, norm and kind are said, and no advice that it does not bear."""

import math

import pytest

from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.health import judge
from gradloc.report.runs.run import read_run
from tests.report.logs.pieces import PIECES


def same(a, b):
    return a == b or math.isnan(a) and math.isnan(b)


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_of_a_log_is_answered_right(name, tmp_path):
    text, right = PIECES[name]
    (tmp_path / "piece.log").write_text(text + "\n", encoding="utf-8")
    run, *others = read_run(tmp_path / "piece.log").runs
    said, health = diagnose(run), judge(run.parts)
    about = " ".join([said.headline, *said.sentences])
    assert not others
    assert said.kind == right.get("kind", said.kind)
    steps = run.metrics.steps
    assert (steps[0], steps[-1]) == right.get("steps", (steps[0], steps[-1]))
    if "peak" in right:
        step, norm = right["peak"]
        assert said.worst.peak.step == step and same(said.worst.peak.norm, norm)
    if "first" in right:
        assert said.worst.first == right["first"]
    if "largest" in right:
        assert max(run.metrics.norms) == right["largest"]
    if "worst" in right:
        assert health.worst.state == right["worst"]
    if "rule" in right:
        assert right["rule"] in [finding.worst.name for finding in health.findings]
    assert len(run.segments) == right.get("segments", len(run.segments))
    assert right.get("says", "") in about and right.get("advice", "") in said.advice
    headline = health.headline if health else ""
    assert right.get("health", "") in headline
    assert "not" not in right or right["not"] not in about
    assert len(steps) > 10 or "No fault" not in headline
