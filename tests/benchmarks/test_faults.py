# SPDX-License-Identifier: Apache-2.0
"""Faults in a search on the real trainer: a sample of lab.benchmarks.faults, all of it, and what the page says."""

import json
from pathlib import Path
from types import SimpleNamespace

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


class _Trial(SimpleNamespace):
    """Cases that all go on."""

    cases = [Fault("SIGTERM", "act"), Fault("SIGTERM", "gather")]
    tried: list[str] = []

    def outcome(self, fault: Fault) -> str:
        self.tried.append(fault.place)
        return f"{GOOD[0]}as it was"


@pytest.mark.parametrize(("core", "num_tried"), [("same", 1), ("other", 2)])
def test_a_record_is_resumed_on_the_core_that_it_was_begun_on(tmp_path, monkeypatch, core, num_tried):
    trainer, other, tried = "TRL, DDP", "verl 0.7, FSDP2 | SIGTERM | act | 1 | rank 0 | observe", []
    known = {f"{trainer} | {_Trial.cases[0].key}": GOOD[1], other: GOOD[0]}
    record = {"core_sha256": {trainer: "same", "verl 0.7, FSDP2": "same"}, "outcomes": known}
    (tmp_path / "faults.json").write_text(json.dumps(record))
    monkeypatch.setattr(faults, "digest", lambda: core)
    monkeypatch.setattr(faults, "Trial", lambda *_: _Trial(tried=tried, close=lambda: None))
    assert faults.main(["--out", str(tmp_path), "--trainer", trainer]) == 0
    found = json.loads((tmp_path / "faults.json").read_text())
    assert len(tried) == num_tried and len(found["outcomes"]) == 3 and found["outcomes"][other] == GOOD[0]
    assert found["core_sha256"] == {trainer: core, "verl 0.7, FSDP2": "same"}


def test_the_page_has_the_record_and_no_outcome_is_bad():
    record = json.loads((ROOT / "lab" / "benchmarks" / "results" / "faults.json").read_text())
    assert faults.markdown(record) in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert [key for key, outcome in record["outcomes"].items() if not outcome.startswith(GOOD)] == []
