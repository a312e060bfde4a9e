# SPDX-License-Identifier: Apache-2.0
"""When an analysis runs, and which of its failures end the run."""

import pytest

from gradloc.analysis.config import BucketSettings, QuartileSettings
from gradloc.analysis.reporter import AnalysisRun, Reporter


class LostWorker(Exception):
    """An error that ends the run."""


RUN = AnalysisRun("unused", 0, {}, {}, {}, vital=(LostWorker,))


class Failing(Reporter):
    name, prefix = "gradient_analysis", "grad_analysis"
    error: Exception | None = None

    def analyse(self, batch, global_step):
        if self.error is not None:
            raise self.error
        return {"analysed": global_step}


@pytest.mark.parametrize("settings", [BucketSettings(mode=True), QuartileSettings(mode=True)])
def test_an_analysis_runs_at_the_guides_cadence(settings):
    reporter, timing = Failing(settings, RUN), {}
    assert [step for step in (1, 2, 50, 51, 52) if reporter.run(lambda: None, step, {}, timing)] == [1, 51]
    metrics = {}
    reporter.run(lambda: None, 101, metrics, timing)
    assert metrics == {"analysed": 101, "grad_analysis/failures": 0} and timing["gradient_analysis"] >= 0


def test_failures_are_counted_and_switch_the_analysis_off_after_three(caplog):
    reporter = Failing(BucketSettings(mode=True, every=1), RUN)
    reporter.error = RuntimeError("no analysis today")
    counted = []
    for step in range(1, 6):
        metrics = {}
        was_due = reporter.run(lambda: None, step, metrics, {})
        counted.append((was_due, metrics.get("grad_analysis/failures")))
    assert counted == [(True, 1), (True, 2), (True, 3), (False, None), (False, None)]
    assert "the gradient analysis at step 3 failed (failure 3 of 3 before it switches itself off)" in caplog.text
    assert "no analysis today" in caplog.text


@pytest.mark.parametrize(
    "error, exit_after", [(LostWorker(), False), (RuntimeError(), True)], ids=["a worker is lost", "nothing else to do"]
)
def test_a_failure_that_training_does_not_survive_is_raised(error, exit_after):
    reporter = Failing(BucketSettings(mode=True, exit_after=exit_after), RUN)
    reporter.error = error
    with pytest.raises(type(error)):
        reporter.run(lambda: None, 1, {}, {})
