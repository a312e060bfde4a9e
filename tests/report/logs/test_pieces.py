# SPDX-License-Identifier: Apache-2.0
"""Each piece of a log gets the right steps, norm and kind, and no advice that it does not support."""

import json
import math

import pytest

from gradloc.report.errors import ReportError
from gradloc.report.runs.diagnosis import diagnose
from gradloc.report.runs.health import judge
from gradloc.report.runs.run import read_run
from tests.report.builder import REPO

FOLDER = REPO / "tests" / "data" / "pieces"
COLLECTED = json.loads((FOLDER / "answers.json").read_text(encoding="utf-8"))
"""Lines of ours in the shapes of public threads and of loggers, with the address of each thread."""


def is_right(path, right):
    """Raises AssertionError where something else is said of a file."""
    if "refused" in right:
        with pytest.raises(ReportError, match=right["refused"]):
            read_run(path)
        return
    run, *others = read_run(path).runs
    said, health = diagnose(run), judge(run.parts)
    about, steps = " ".join([said.headline, *said.sentences]), run.metrics.steps
    headline = health.headline if health else ""
    assert len(others) + 1 == right.get("runs", 1)
    assert said.kind in right.get("kinds", [right.get("kind", said.kind)])
    assert [steps[0], steps[-1]] == list(right.get("steps", (steps[0], steps[-1])))
    assert (steps[-1], len(steps)) == (right.get("last", steps[-1]), right.get("rows", len(steps)))
    assert len(run.segments) == right.get("segments", len(run.segments))
    if "peak" in right:
        step, norm = right["peak"]
        peak = said.worst.peak
        assert peak.step == step and (peak.norm == norm or norm == "nan" and math.isnan(peak.norm))
    if "first" in right:
        assert said.worst.first == right["first"]
    if "lost" in right:
        assert right["lost"] in [step for explosion in said.explosions for step in explosion.lost]
    if "largest" in right:
        assert max(run.metrics.norms) == right["largest"]
    if "worst" in right:
        assert health.worst.state == right["worst"]
    if "rule" in right:
        assert right["rule"] in [finding.worst.name for finding in health.findings]
    assert right.get("says", "") in about and right.get("advice", "") in said.advice
    assert right.get("health", "") in headline
    assert right.get("limit", "") in " ".join(said.limits)
    assert "unsaid" not in right or right["unsaid"] not in about
    assert len(steps) > 10 or "No fault" not in headline


@pytest.mark.parametrize("name", COLLECTED)
def test_a_piece_of_the_collection_is_answered_right(name):
    is_right(FOLDER / name, COLLECTED[name])
