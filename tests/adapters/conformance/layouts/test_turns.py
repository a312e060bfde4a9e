# SPDX-License-Identifier: Apache-2.0
"""Responses of several turns: what a tool answered in between is attended to, left out of the loss, and no culprit."""

import json
from pathlib import Path

from tests.adapters.conformance.layouts.checks import MODES, TAU, check_planted, check_training
from tests.trainers import NONE, default_on

ANSWERED = (3, 6)


def test_a_culprit_is_placed_in_its_turn_and_a_tools_answer_is_none(world, dump_dir):
    """The answer's own advantages are a million, and its old log-probs are -30."""
    event, _ = check_planted(world, dump_dir, [(12, 8, -1e4), (6, 1, 2e3)], [TAU], answered=ANSWERED)
    named = {(c["row"], c["positions"][0]): c for c in event["culprits"]}
    assert named[12, 8]["turn"] == {"number": 2, "num_turns": 2, "num_before": 3}
    assert named[6, 1]["turn"] == {"number": 1, "num_turns": 2, "num_before": 0}
    assert "in turn 2 " in event["verdict"]
    document = json.loads((Path(dump_dir) / event["folder"] / "sequences.json").read_text())
    (held,) = (sequence for sequence in document["sequences"] if sequence["row"] == 12)
    assert held["columns"]["response_mask"] == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1] and len(held["tokens"]) == 12


@default_on(verl07=("mask",), verl09=NONE)
@MODES
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, mode):
    check_training(world, dump_dir, mode, answered=ANSWERED)
