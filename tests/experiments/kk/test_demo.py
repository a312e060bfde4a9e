# SPDX-License-Identifier: Apache-2.0
"""kk-demo's shortest form: the arm with both methods, one seed, two steps."""

import json

import pytest

from tests.experiments.real import run_to_the_end

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_demo_runs_an_arm_and_ends_in_a_table_and_a_plot(patched_tree, tmp_path):
    pytest.importorskip("pysat")
    pytest.importorskip("ray")
    run_dir = tmp_path / "runs"
    arguments = ["--arms", "ar-lopti", "--seeds", "1", "demo.steps=2"]
    run_to_the_end("kk-demo", *arguments, run_dir=run_dir, VERL_REPO=str(patched_tree))
    table = (run_dir / "summary.md").read_text()
    assert "| ar-lopti | 1 |" in table
    assert (run_dir / "summary.png").is_file()
    lines = (run_dir / "ar-lopti-seed1" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    for step in steps:
        assert -3 <= step["critic/score/mean"] <= 3
        assert step["lopti/low/share"] + step["lopti/high/share"] == pytest.approx(1)
        assert 0.7 < step["advantage_reweighting/kept_share"] <= 1
    kinds = ("acc", "wrong_answer", "format_error")
    final = {key.split("/")[2]: v for key, v in steps[-1].items() if "/mean@4" in key}
    assert sum(final[kind] for kind in kinds) == pytest.approx(1)
