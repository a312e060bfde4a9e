# SPDX-License-Identifier: Apache-2.0
"""The demo in a plain loop, as a user runs it; and that a loop needs torch and numpy alone."""

import os
import subprocess
import sys

import pytest

from tests.experiments.conftest import REPO
from tests.experiments.real import demo
from tests.world.events import events_in

WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("verl", "ray", "trl", "transformers", "accelerate", "safetensors", "jinja2", "rich"):
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
sys.argv[1:] = ["steps=20", "first_step=18", "last_step=18"]
runpy.run_module("lab.experiments.loop.demo", run_name="__main__")
"""


@pytest.mark.full
def test_it_names_exactly_the_token_that_it_planted(tmp_path):
    assert len(demo("demo", "trainer=loop", run_dir=tmp_path / "a run", LOOP_PYTHON=sys.executable)) == 60


@pytest.mark.slow
def test_it_needs_no_trainer_and_nothing_of_the_report_s(tmp_path):
    environ = {**os.environ, "GRADLOC_RUN_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (event,) = events_in(tmp_path)
    assert event["step"]["global_step"] == 18
