# SPDX-License-Identifier: Apache-2.0
"""The adaptive trigger in the real actor: through a collapse, and before it has a threshold."""

import re

import pytest
import torch

from tests.trainers import NONE, VERL09, default_on, not_on
from tests.world import REPO
from tests.world.actions import ACTOR, NUM_GROWING
from tests.world.events import read_events

ON = [f"{ACTOR}.spike_detection=True"]


@default_on(verl07=NONE, verl09=NONE)
@not_on(VERL09, "the page shows those of verl 0.7's loss")
def test_the_page_shows_how_far_a_collapse_takes_the_weights_and_when_it_is_flagged(world, tmp_path):
    """Distance of the weights from the healthy twin's, over the distance that the twin went, by action."""
    page = (REPO / "docs" / "trigger.md").read_text()
    shown = {mode: float(value) for mode, value in re.findall(r"^\| `(\w+)` \| (0\.\d+) \|", page, re.M)}
    assert shown.keys() == {"observe", "mask", "skip"}
    run = {
        mode: world.run("actions.collapse", mode=mode, growth=4.0, dump_dir=str(tmp_path / mode))
        for mode in ("healthy", *shown)
    }

    def weights(mode, moment):
        return torch.cat([answer["weights"][moment] for answer in run[mode]])

    travel = (weights("healthy", 1) - weights("healthy", 0)).norm()
    for mode, distance in shown.items():
        assert (weights(mode, 1) - weights("healthy", 1)).norm() / travel == pytest.approx(distance, abs=0.05), mode
    over = [over for spikes, over in run["observe"][0]["steps"] if spikes]
    assert f"| {len(over)} of {NUM_GROWING}, from {over[0]:.1f} times the threshold" in page
    assert not any(spikes for spikes, _ in run["healthy"][0]["steps"])


@default_on(verl07=("nan",), verl09=("inf",))
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_norm_that_is_not_finite_in_the_warm_up_is_looked_into_certified_and_masked(world, dump_dir, kind):
    answer, _ = world.run(
        "spikes.update_batch", kind=kind, overrides=[*ON, f"{ACTOR}.gradloc.action.mode=mask"], dump_dir=dump_dir
    )
    (event,) = read_events(dump_dir)
    assert event["trigger"]["kind"] == "non_finite" and event["trigger"]["threshold"] is None
    (culprit,) = event["culprits"]
    assert (culprit["row"], culprit["positions"]) == {"nan": (10, [3]), "inf": (1, [0])}[kind]
    assert culprit["cause"]["label"] == "non_finite"
    assert event["certificate"]["verdict"] == "explained" and event["certificate"]["norm_after"] < 10
    assert event["action"]["taken"] == "mask" and "rehearsal" not in event["verdict"]
    assert answer["metrics"]["gradloc/spikes"] == [1] and answer["metrics"]["gradloc/masked_tokens"] == [1]
    assert 0 < answer["next_norm"] < 10
