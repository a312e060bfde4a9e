# SPDX-License-Identifier: Apache-2.0
"""A bundle of TRL's, replayed on a plain model: the same culprits and the same norm."""

import json

import pytest

from gradloc.replay.__main__ import main
from tests.replay.conftest import check_same
from tests.world.events import events_in

TOKEN = {"what": "token", "factor": 1e3}
BEFORE = {"evidence": {"checkpoint": "before_step", "bundle": "full"}}
CASES = {
    "dapo": {},
    "KL and old log-probs": {"beta": 0.05, "num_iterations": 2, "loss_type": "dr_grpo"},
    "RLOO": {"base": "RLOOTrainer", "plant": {"what": "sequence", "factor": 1e3}},
    "experts and their balancing loss": {"experts": True, "router_aux_loss_coef": 0.02},
    "DDP": {"plant": {**TOKEN, "rank": 1}, "loss_type": "grpo"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_same_event_at_its_weights_gives_the_same_culprits_and_the_same_norm(request, run, tmp_path, case):
    on_two = "rank" in case.get("plant", {})
    run = request.getfixturevalue("run_on_two") if on_two else run
    run("watched", **{"plant": TOKEN, "gradloc": BEFORE, **case})
    event = events_in(tmp_path / "watched")[0]
    folder = tmp_path / "watched" / "gradloc"
    model, out = next(folder.glob("weights/*/actor")), tmp_path / "replay.json"
    bundle = folder / event["folder"]
    assert main([str(bundle), "--model", str(model), "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    check_same(found, bundle, slack=1e-3 if "experts" in case else 1e-5)  # a router's own loss is in no coefficient
    assert found["has_beside"] is ("experts" in case)
