# SPDX-License-Identifier: Apache-2.0
"""The demo itself: verl's real trainer, two FSDP2 workers, a planted spike, and its token."""

import json

import pytest

from tests.experiments.real import demo, largest_difference

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("verl", ["0.7.0", pytest.param("0.7.1", marks=pytest.mark.slow)])
def test_the_demo_names_exactly_the_token_that_it_planted(patched_trees, verl, tmp_path):
    run_dir = tmp_path / "a run"
    short = ["demo.steps=3", "demo.fault.first_step=2", "demo.fault.last_step=2"]
    steps = demo("demo", *short, run_dir=run_dir, VERL_REPO=str(patched_trees(verl)))
    assert len(steps) == 3 and largest_difference(steps) < 1e-4
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [line["step"] for line in lines if "gradloc/verdict" in line["data"]]
    assert told == [2] and len(lines) == 4, "the verdict is a line of its own"
