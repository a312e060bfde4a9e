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
    about, steps, worst = " ".join([said.headline, *said.sentences]), run.metrics.steps, said.worst
    headline = health.headline if health else ""
    facts = {
        "runs": len(others) + 1,
        "kind": said.kind,
        "steps": [steps[0], steps[-1]],
        "last": steps[-1],
        "rows": len(steps),
        "segments": len(run.segments),
        "spans": [[segment.first, segment.last] for segment in run.segments],
        "unit": run.unit,
        "peak": worst and [worst.peak.step, "nan" if math.isnan(worst.peak.norm) else worst.peak.norm],
        "first": worst and worst.first,
        "largest": max(run.metrics.norms, default=None),
        "norms": len(run.metrics.norms),
        "worst": health and health.worst.state,
    }
    holds = {
        "lost": [step for explosion in said.explosions for step in explosion.lost],
        "rule": [finding.worst.name for finding in health.findings],
        "says": about,
        "advice": said.advice,
        "health": headline,
        "limit": " ".join(said.limits),
    }
    for name, wanted in ({"runs": 1} | right).items():
        if name in facts:
            assert facts[name] == wanted, name
        elif name in holds:
            assert wanted in holds[name], name
        else:
            assert name in ("kinds", "unsaid", "source"), f"nobody checks {name}"
    assert said.kind in right.get("kinds", [said.kind])
    assert "unsaid" not in right or right["unsaid"] not in about
    assert len(steps) > 10 or "No fault" not in headline


@pytest.mark.parametrize("name", COLLECTED)
def test_a_piece_of_the_collection_is_answered_right(name):
    is_right(FOLDER / name, COLLECTED[name])
