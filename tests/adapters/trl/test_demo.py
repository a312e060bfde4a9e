# SPDX-License-Identifier: Apache-2.0
"""The demo on TRL as a user runs it, with the real trainer in two processes."""

import json
import sys

import pytest

from tests.experiments.real import run_to_the_end
from tests.world.events import read_events

SHORT = ("demo", "trainer=trl", "steps=3", "first_step=2", "last_step=2")


@pytest.mark.e2e
def test_the_demo_names_exactly_the_token_that_it_planted(tmp_path):
    run_dir = tmp_path / "a run"
    printed = run_to_the_end(*SHORT, run_dir=run_dir, TRL_PYTHON=sys.executable)
    assert "FOUND: the event names exactly the token that was planted" in printed
    assert (run_dir / "report.html").is_file()
    assert len(read_events(run_dir / "gradloc")) == 1
    lines = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    norms = [data["actor/grad_norm"] for data in lines]
    assert norms[1] > 10 * max(norms[0], norms[2]) and [data["gradloc/events"] for data in lines] == [0, 1, 0]


@pytest.mark.slow  # test_actions.py has a NaN by default
@pytest.mark.e2e
def test_a_nan_is_named_and_its_step_taken_without_the_token(tmp_path):
    printed = run_to_the_end(
        *SHORT, "advantage=nan", "gradloc=mask", run_dir=tmp_path / "run", TRL_PYTHON=sys.executable
    )
    assert "FOUND: the event names exactly the token that was planted" in printed and "action: mask" in printed
