# SPDX-License-Identifier: Apache-2.0
"""The demo itself: verl's real trainer, two FSDP2 workers, a planted spike, and its token."""

import json

import pytest

from tests.experiments.conftest import REPO
from tests.experiments.real import run_to_the_end

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("verl", ["0.7.0", pytest.param("0.7.1", marks=pytest.mark.slow)])
def test_the_demo_names_exactly_the_token_that_it_planted(patched_trees, verl, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    run_dir = tmp_path / "a run"
    # The shortest honest form: every part as in the demo, the fault early, and no steps after it
    # but one, which shows that training went on.
    arguments = ["demo", "demo.steps=3", "demo.fault.first_step=2", "demo.fault.last_step=2"]
    printed = run_to_the_end(*arguments, run_dir=run_dir, VERL_REPO=str(patched_trees(verl)))
    assert "FOUND: the event names exactly the token that was planted" in printed
    schema = json.loads((REPO / "schema" / "event.v1.schema.json").read_text())
    events = (run_dir / "gradloc" / "events.jsonl").read_text().splitlines()
    for line in events:
        jsonschema.validate(json.loads(line), schema)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told, steps = (
        [line for line in lines if ("gradloc/verdict" in line["data"]) is is_told] for is_told in (True, False)
    )
    assert [line["step"] for line in told] == [2], "the verdict is a line of its own"
    norms = {step["step"]: step["data"]["actor/grad_norm"] for step in steps}
    assert sorted(norms) == [1, 2, 3]
    assert norms[2] > 10 * max(norms[1], norms[3])
    assert steps[1]["data"]["gradloc/events"] == 1
    # The rollouts come from the weights being trained, not from the ones the run began with.
    assert all(step["data"]["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
