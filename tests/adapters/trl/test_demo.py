# SPDX-License-Identifier: Apache-2.0
"""The demo on TRL as a user runs it, with the real trainer in two processes."""

import sys

import pytest

from tests.experiments.real import demo, run_to_the_end

SHORT = ("demo", "trainer=trl", "steps=3", "first_step=2", "last_step=2")


@pytest.mark.e2e
def test_the_demo_names_exactly_the_token_that_it_planted(tmp_path):
    assert len(demo(*SHORT, run_dir=tmp_path / "a run", TRL_PYTHON=sys.executable)) == 3


@pytest.mark.slow  # test_actions.py has a NaN by default
@pytest.mark.e2e
def test_a_nan_is_named_and_its_step_taken_without_the_token(tmp_path):
    printed = run_to_the_end(
        *SHORT, "advantage=nan", "gradloc=mask", run_dir=tmp_path / "run", TRL_PYTHON=sys.executable
    )
    assert "FOUND: the event names exactly the token that was planted" in printed and "action: mask" in printed
