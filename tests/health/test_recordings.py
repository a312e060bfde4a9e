# SPDX-License-Identifier: Apache-2.0
"""The verdicts on three recorded runs of the real trainer are what a person would say of them."""

from pathlib import Path

import pytest

from gradloc.report.runs.health import LOGGED, STATES, judge
from gradloc.report.runs.run import read_run
from tests.health.histories import named

RECORDINGS = Path(__file__).parent / "recordings"


@pytest.fixture(params=["healthy", "spiking", "collapsed"])
def recording(request):
    run = read_run(RECORDINGS / f"{request.param}.jsonl")
    assert not run.notes
    return run.metrics


def verdicts_on(name):
    health = judge(read_run(RECORDINGS / f"{name}.jsonl").metrics)
    return health, {verdict.step: named(verdict) for verdict in health.verdicts}


def test_the_report_judges_as_the_trainer_did(recording):
    health = judge(recording)
    assert [STATES[int(state)] for state in recording.get(LOGGED)] == [verdict.state for verdict in health.verdicts]
    assert [int(count) for count in recording.get("health/reasons")] == [
        len(verdict.reasons) for verdict in health.verdicts
    ]
    assert not health.notes


def test_the_healthy_run_is_healthy_throughout():
    health, _ = verdicts_on("healthy")
    assert health.num_unwell == 0
    assert health.headline.startswith("No fault in 24 steps, by ") and "actor/grad_norm" in health.headline


def test_the_spiking_run_is_in_danger_at_its_spike_and_well_again_after_it():
    health, reasons = verdicts_on("spiking")
    assert reasons.pop(20) == {"gradient_jump": "danger", "spikes": "warning"}
    assert set(map(len, reasons.values())) == {0}
    assert health.state == "healthy"


def test_the_collapsed_run_warns_before_it_breaks_and_stays_in_danger():
    health, reasons = verdicts_on("collapsed")
    assert all(not reasons[step] for step in range(1, 8))
    assert health.worst.step == 10 and health.state == "danger"
    assert reasons[30] == dict.fromkeys(("no_gradient", "reward_fall", "zero_variance", "truncation"), "danger")
    assert next(s for s in reasons if reasons[s].get("reward_fall") == "danger") == 13
    assert [finding.worst.name for finding in health.findings][:2] == ["no_gradient", "reward_fall"]


def test_without_the_patchs_own_metrics_the_same_runs_get_the_same_worst_state(recording):
    own = ("gradloc/", "health/", "rollout/zero_variance", "actor/grad_norm_max")
    kept = {name: v for name, v in recording.series.items() if not name.startswith(own)}
    unpatched = judge(type(recording)(recording.source, recording.steps, kept))
    assert unpatched.worst.state == judge(recording).worst.state
    assert unpatched.worst.step == judge(recording).worst.step
    assert "spikes" in unpatched.silent
