# SPDX-License-Identifier: Apache-2.0
"""Actions on a step that spikes; a NaN, which TRL's own trainer would take."""

import math

import pytest

from tests.adapters.trl.conftest import SAME, named_in
from tests.adapters.trl.harness import stop_after
from tests.world import DEVICE
from tests.world.events import events_in

TOKEN = {"what": "token", "factor": 1e3}
NAN = {"what": "token", "factor": math.nan}
samples_nan = pytest.mark.skipif(DEVICE != "cpu", reason="there it ends the process: an assertion on the device")


@samples_nan
def test_a_nan_kills_a_stock_run_and_its_log_hides_the_loss(run):
    stock = run("stock", plant=NAN, max_steps=5)
    assert not stock["is_finite"], "every weight"
    losses = [log["loss"] for log in stock["logs"] if "loss" in log]
    assert all(math.isfinite(loss) for loss in losses) and any(math.isnan(norm) for norm in stock["norms"])


@samples_nan
def test_observing_a_nan_says_that_the_optimizer_took_it(run, tmp_path):
    run("watched", plant=NAN, max_steps=3)
    (event,) = events_in(tmp_path / "watched")
    assert event["trigger"]["kind"] == "non_finite" and event["consequence"]["is_taken"] is True
    assert event["cause"]["label"] == "non_finite"
    assert "The optimizer took the step, so the weights are not finite any more." in event["verdict"]


@pytest.mark.parametrize("mode", ["mask", "skip"])
def test_a_nan_is_survived(run, tmp_path, mode):
    saved = run("watched", plant=NAN, max_steps=5, gradloc={"action": {"mode": mode}})
    assert saved["is_finite"] and saved["step"] == 5 and not saved["error"]
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == [tuple(place) for place in saved["where"]]
    assert event["action"]["taken"] == mode and event["consequence"]["is_taken"] is (mode == "mask")
    if mode == "mask":
        without = run("without", plant=NAN, max_steps=5)
        assert [saved[key] for key in SAME] == [without[key] for key in SAME]


def test_skip_takes_no_step_and_the_schedule_goes_on(run):
    before = run("stock", plant={}, max_steps=4, folder="a")
    skipped = run("watched", plant=TOKEN, max_steps=4, gradloc={"action": {"mode": "skip"}})
    assert skipped["scheduler"] == before["scheduler"] and skipped["norms"][2] == 0.0
    assert [log["gradloc/skip"] for log in skipped["logs"] if "gradloc/skip" in log] == [0, 0, 1, 0]


def test_abort_stops_the_run_before_the_step_with_the_event_on_disk(run, tmp_path):
    two = run("stock", plant={}, max_steps=4, prepare=stop_after(2))
    aborted = run("watched", plant=TOKEN, gradloc={"action": {"mode": "abort"}})
    assert aborted["error"].startswith("AbortedBySpike: gradloc stopped the run (gradloc.action.mode=abort). One token")
    assert aborted["step"] == 2 and aborted["weights"] == two["weights"]
    (event,) = events_in(tmp_path / "watched")
    assert event["action"]["taken"] == "abort" and event["consequence"]["is_taken"] is False
