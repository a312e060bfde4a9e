# SPDX-License-Identifier: Apache-2.0
"""kk-demo's shortest form: the arm with both methods, one seed, two steps."""

import json
import os
import subprocess
import sys

import pytest

from tests.experiments.conftest import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_demo_runs_an_arm_and_ends_in_a_table_and_a_plot(patched_tree, tmp_path):
    pytest.importorskip("pysat")
    pytest.importorskip("ray")
    run_dir = tmp_path / "runs"
    arguments = ["--arms", "ar-lopti", "--seeds", "1", "demo.steps=2"]
    done = subprocess.run(
        [str(REPO / "run_experiment.sh"), "kk-demo", *arguments],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "VERL_REPO": str(patched_tree),
            "RUN_DIR": str(run_dir),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
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
