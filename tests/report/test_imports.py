# SPDX-License-Identifier: Apache-2.0
"""Neither torch nor a trainer is imported for a report, so that it is made where they are not."""

import json
import subprocess
import sys

import pytest

from tests.report.builder import REPO, make_event, make_metrics, write_run
from tests.report.test_check import ON, TRL

ALONE = """
import sys

from gradloc.report.cli import main

assert main(sys.argv[1:]) == 0
assert not {"torch", "verl", "trl", "transformers", "ray", "tensordict", "wandb"} & sys.modules.keys()
"""


def run(*words, path=REPO):
    environment = {"PYTHONPATH": f"{path}:{REPO}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", ALONE, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_page_is_written_and_a_log_is_judged(tmp_path):
    run(write_run(tmp_path / "run", [make_event()], metrics=make_metrics()), "-o", tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    run(REPO / "tests" / "data" / "logs" / "console" / "ray.log")


@pytest.mark.full
def test_configs_are_checked(patched_tree, tmp_path):
    (tmp_path / "grpo.json").write_text(json.dumps(TRL))
    for words in (ON, [tmp_path / "grpo.json"]):
        run("check", *words, "--model", "7B", path=patched_tree)
