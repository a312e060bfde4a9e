# SPDX-License-Identifier: Apache-2.0
"""ZeRO, where it does not move what it should and where a Trainer holds it; the rest is in test_ranks.py."""

import pytest

from tests.recipes.test_ranks import are_same
from tests.world.events import events_in


def test_offload_trains_without_a_watch_and_says_why(train, tmp_path):
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    watched = train(stage=2, folder=str(tmp_path), more=offloaded)
    assert [each["is_off"] for each in watched] == [3, 3] and events_in(tmp_path) == []
    assert are_same(watched, train(stage=2, more=offloaded))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_under_accelerate_is_watched(train, tmp_path, stage):
    given = {"name": "train_by_trainer", "stage": stage, "folder": str(tmp_path), "output": str(tmp_path / "out")}
    masked, without = train(action="mask", **given), train(is_planted=False, **given)
    assert are_same(masked, without) and not are_same(masked, train(**given))
    assert [event["certificate"]["verdict"] for event in events_in(tmp_path)] == ["explained"]
