# SPDX-License-Identifier: Apache-2.0
"""A step's batch while a run trains: a line, metrics, and nothing that harms the run."""

import json
import time

import pytest

from gradloc.config import GradLocConfig
from gradloc.mismatch.steps import StepJudge

torch = pytest.importorskip("torch")


def batch(rows=64, width=100, lag=0):
    torch.manual_seed(0)
    rollout = -torch.rand(rows, width) * 3
    trainer = torch.roll(rollout, lag, 1) + 1e-6 * torch.randn(rows, width)
    mask = torch.ones(rows, width, dtype=torch.long)
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": trainer,
        "response_mask": mask,
        "responses": torch.randint(1000, (rows, width)),
    }


def test_it_is_off_by_default():
    assert GradLocConfig().mismatch.every == 0
    assert StepJudge(0, "nowhere")(batch(), {}, 0) == {}


def test_every_nth_step_has_a_line_and_metrics(tmp_path):
    judge = StepJudge(2, str(tmp_path / "gradloc"))
    labels = {"uid": [f"p{row // 8}" for row in range(64)]}
    assert judge(batch(), labels, 1) == {}
    assert judge(batch(), labels, 2)["gradloc/mismatch_is_noise"] == 1
    assert judge(batch(lag=1), labels, 4)["gradloc/mismatch_is_noise"] == 0
    assert judge(batch(lag=1), labels, 4) == {}, "the second update of a step in stages"
    lines = [json.loads(line) for line in (tmp_path / "gradloc" / "mismatch.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(2, "noise"), (4, "shift")]


def test_nothing_is_said_without_the_columns_or_where_they_are_one(tmp_path):
    judge, tensors = StepJudge(1, str(tmp_path)), batch()
    assert judge({name: value for name, value in tensors.items() if name != "rollout_log_probs"}, {}, 1) == {}
    assert judge({**tensors, "old_log_probs": tensors["rollout_log_probs"]}, {}, 1) == {}
    assert not (tmp_path / "mismatch.jsonl").exists()


def test_what_fails_is_logged_and_the_run_goes_on(tmp_path, caplog):
    judge, tensors = StepJudge(1, str(tmp_path)), batch()
    assert judge({**tensors, "rollout_log_probs": tensors["rollout_log_probs"] * 0}, {}, 1) == {}
    assert "cannot be compared: all log-probs of the rollout engine are 0" in caplog.text
    assert judge({**tensors, "response_mask": None}, {}, 2) == {}
    assert "training goes on" in caplog.text


def test_of_a_million_tokens_whole_rows_are_looked_at_quickly(tmp_path):
    judge, tensors = StepJudge(1, str(tmp_path)), batch(1000, 1000)
    before = {name: value.clone() for name, value in tensors.items()}
    judge(tensors, {}, 1)
    spent = []
    for step in range(2, 5):
        began = time.process_time()
        judge(tensors, {}, step)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.1, "50 ms where nothing else runs"
    assert all(torch.equal(before[name], value) for name, value in tensors.items())
    assert json.loads((tmp_path / "mismatch.jsonl").read_text().splitlines()[0])["tokens"] == 50_000
