# SPDX-License-Identifier: Apache-2.0
"""Faults in a search on the real trainer: a sample of lab.benchmarks.faults, all of it, and what the page says."""

import json
from pathlib import Path

import pytest

from lab.benchmarks import faults
from lab.benchmarks.faults import Fault

ROOT = Path(__file__).resolve().parents[2]
GOOD = ("goes on, the step ", "all end, with ")


@pytest.mark.slow
def test_a_run_goes_on_with_the_step_of_its_mode_or_ends_with_a_sentence(tmp_path):
    trial = faults.Trial("verl 0.7, FSDP2", tmp_path, pause_s=1.0, patience_s=1.0)
    try:
        assert len(trial.cases) > 100 and len({case.key for case in trial.cases}) == len(trial.cases)
        counted = "goes on, the step as it was, and counts the failure"
        assert trial.outcome(Fault("host memory", "agreement", 5, rank=1, mode="mask")) == counted
        assert trial.outcome(Fault("full disk", "the device is full", mode="mask")) == GOOD[0] + "without the token"
        assert trial.outcome(Fault("a rank stands still", "certificate", rank=1)) == GOOD[0] + "as it was"
        assert trial.outcome(Fault("SIGKILL", "certificate", rank=1)) == GOOD[1] + "gradloc's sentence"
    finally:
        trial.close()


@pytest.mark.slow
def test_so_it_is_with_every_fault(tmp_path):
    assert faults.main(["--out", str(tmp_path)]) == 0


def test_the_page_has_the_record_and_no_outcome_is_bad():
    record = json.loads((ROOT / "lab" / "benchmarks" / "results" / "faults.json").read_text())
    assert faults.markdown(record) in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert [key for key, outcome in record["outcomes"].items() if not outcome.startswith(GOOD)] == []
