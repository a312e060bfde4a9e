# SPDX-License-Identifier: Apache-2.0
"""The GPU's benchmark, small and on a CPU: the same command in a process of its own."""

import json
import subprocess
import sys

import pytest

from tests.world import REPO

pytestmark = pytest.mark.full


def test_the_one_command_measures_all_it_says_and_holds_on_kernels_that_repeat(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "tiny", "--tokens", "128"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (cell,) = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert cell["backward_difference"] == cell["forward_difference"] == 0.0
    assert [found["plant"] for found in cell["found"]] == ["single_10", "single_1e3", "single_1e5", "three", "eight"]
    for found in cell["found"]:
        assert (found["recall"], found["false_positives"], found["verdict"]) == (1.0, 0, "explained")
        assert found["is_within_bound"] and 0.8 <= found["closure"] <= 1.25
        assert found["times_update"] > 1 and found["peak_gib"] is None
    table = (tmp_path / "gpu.md").read_text()
    assert ran.stdout.strip() in table and table.count("\n| tiny bfloat16 x1 ") == 5
