# SPDX-License-Identifier: Apache-2.0
"""The change that docs/upstream.md would ask verl for: it applies to the installed verl, and its own test passes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

verl = pytest.importorskip("verl")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "upstream.md"
MOST_LINES = 60


def the_change() -> str:
    return PAGE.read_text(encoding="utf-8").partition("```diff\n")[2].partition("```")[0]


def test_it_is_small_enough_to_be_answered_for():
    changed = [line for line in the_change().splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= MOST_LINES


@pytest.mark.slow
def test_it_applies_to_the_installed_verl_and_its_own_test_passes(tmp_path):
    shutil.copytree(Path(verl.__file__).parent, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    apply = ["git", "apply", "--exclude=docs/*", "--unidiff-zero", "-"]  # the wheel has no docs
    subprocess.run(apply, input=the_change(), text=True, cwd=tmp_path, check=True)
    test = "-m pytest -q -p no:cacheprovider tests/workers/test_step_callback_on_cpu.py"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, *test.split()], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
