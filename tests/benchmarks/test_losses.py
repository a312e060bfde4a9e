# SPDX-License-Identifier: Apache-2.0
"""The table of docs/losses.md is what verl's own losses do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_has_every_line_that_the_command_prints(patched_tree):
    environ = {**os.environ, "PYTHONPATH": f"{patched_tree}:{ROOT}"}
    command = [sys.executable, "-m", "lab.benchmarks.losses"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 14 and all(f"{line}\n" in PAGE for line in lines)
