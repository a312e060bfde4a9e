# SPDX-License-Identifier: Apache-2.0
"""Responses of several turns: what a tool answered in between is attended to, left out of the loss, and no culprit."""

import json
from pathlib import Path

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
ANSWERED = (3, 6)


def test_a_culprit_is_placed_in_its_turn_and_a_tools_answer_is_none(world, dump_dir):
    """The answer's own advantages are a million, and its old log-probs are -30."""
    found, _ = world.run(
        "spikes.localize_planted",
        plants=[(12, 8, -1e4), (6, 1, 2e3)],
        overrides=TAU,
        dump_dir=dump_dir,
        answered=ANSWERED,
    )
    (event,) = read_events(dump_dir)
    named = {(c["row"], c["positions"][0]): c for c in event["culprits"]}
    assert sorted(named) == found["planted"] == [(6, 1), (12, 8)]
    assert event["certificate"]["verdict"] == "explained"
    assert event["trigger"]["grad_norm"] == pytest.approx(found["oracle_norm"], rel=1e-4)
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=2e-3)
    assert named[12, 8]["turn"] == {"number": 2, "num_turns": 2, "num_before": 3}
    assert named[6, 1]["turn"] == {"number": 1, "num_turns": 2, "num_before": 0}
    assert "in turn 2 " in event["verdict"]
    document = json.loads((Path(dump_dir) / event["folder"] / "sequences.json").read_text())
    (held,) = (sequence for sequence in document["sequences"] if sequence["row"] == 12)
    assert held["response_mask"] == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1] and len(held["tokens"]) == 12


@pytest.mark.parametrize(
    ("mode", "same"), [("mask", "as_without"), pytest.param("observe", "as_spiked", marks=pytest.mark.slow)]
)
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, mode, same):
    settings = [*TAU, f"{ACTOR}.gradloc.action.mode={mode}"]
    found, other = world.run("actions.train_epochs", overrides=settings, dump_dir=dump_dir, answered=ANSWERED)
    assert found[same] and other[same], "bit for bit"
    assert found["metrics"]["gradloc/spikes"] == [3]
