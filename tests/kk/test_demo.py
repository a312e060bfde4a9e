# SPDX-License-Identifier: Apache-2.0
"""kk-demo's shortest form: the plain arm and the one with both methods, one seed, two steps."""

import json
import os
import subprocess
import sys

import pytest

from tests.experiments.conftest import REPO

pytestmark = pytest.mark.e2e


def test_the_demo_runs_its_arms_and_ends_in_a_table_and_a_plot(patched_tree, tmp_path):
    pytest.importorskip("pysat")
    pytest.importorskip("ray")
    run_dir = tmp_path / "runs"
    arms, arguments = ("baseline", "ar-lopti"), ["--seeds", "1", "demo.steps=2"]
    done = subprocess.run(
        [str(REPO / "run_experiment.sh"), "kk-demo", "--arms", ",".join(arms), *arguments],
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
    assert all(f"| {arm} | 1 |" in table for arm in arms)
    assert (run_dir / "summary.png").is_file()
    steps = {
        arm: [
            json.loads(line)["data"]
            for line in (run_dir / f"{arm}-seed1" / "metrics.jsonl").read_text().splitlines()
        ]
        for arm in arms
    }
    # One seed, one beginning: the arms part with the first update.
    first = [steps[arm][0]["critic/score/mean"] for arm in arms]
    assert first[0] == first[1] and -3 <= first[0] <= 3
    for step in steps["ar-lopti"]:
        assert step["lopti/low/share"] + step["lopti/high/share"] == pytest.approx(1)
        assert 0.7 < step["advantage_reweighting/kept_share"] <= 1
    assert not any("lopti" in key for step in steps["baseline"] for key in step)
    kinds = ("acc", "wrong_answer", "format_error")
    final = {key.split("/")[2]: v for key, v in steps["baseline"][-1].items() if "/mean@4" in key}
    assert sum(final[kind] for kind in kinds) == pytest.approx(1)
