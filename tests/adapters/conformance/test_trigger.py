# SPDX-License-Identifier: Apache-2.0
"""The adaptive trigger in the real actor: through a collapse, and before it has a threshold."""

import re

import pytest
import torch

from tests.trainers import NONE, VERL09, default_on, not_on
from tests.world import REPO
from tests.world.actions import ACTOR, NUM_BEFORE, NUM_GROWING
from tests.world.events import read_events

ON = [f"{ACTOR}.spike_detection=True"]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """Runs of the same batches whose one token's advantage quadruples from step to step, by action; and the twin."""
    modes = ("healthy", "observe", "mask", "skip")
    return {
        mode: world.run("actions.collapse", mode=mode, growth=4.0, dump_dir=str(tmp_path_factory.mktemp(mode)))
        for mode in modes
    }


@default_on(verl07=NONE, verl09=NONE)
def test_a_collapse_is_flagged_from_the_cap_to_its_end_and_nothing_after_it(run):
    for mode in ("observe", "mask", "skip"):
        steps = run[mode][0]["steps"]
        flagged = [number for number, step in enumerate(steps) if step["spikes"]]
        last = NUM_BEFORE + NUM_GROWING - 1
        assert flagged == list(range(flagged[0], last + 1)) and flagged[0] < NUM_BEFORE + 6
        assert all(step["norm_over_threshold"] < 1 for step in steps[16 : flagged[0]] + steps[last + 1 :])
        assert steps[last]["norm_over_threshold"] > 1000 and steps[last]["threshold"] < 20
        assert all("threshold" not in step for step in steps[:16])  # the warm-up has none
    assert not any(step["spikes"] for step in run["healthy"][0]["steps"])


@pytest.fixture
def distance(run):
    """Distance of the weights from the healthy twin's, over the distance that the twin went, by action."""

    def weights(mode, moment):
        return torch.cat([answer["weights"][moment] for answer in run[mode]])

    travel = (weights("healthy", 1) - weights("healthy", 0)).norm()
    return {mode: float((weights(mode, 1) - weights("healthy", 1)).norm() / travel) for mode in run}


@default_on(verl07=NONE, verl09=NONE)
def test_mask_and_skip_keep_the_weights_near_the_healthy_twins(distance):
    print({mode: round(value, 3) for mode, value in distance.items()})
    assert distance["mask"] < 0.6 * distance["observe"]
    assert distance["skip"] < 0.9 * distance["observe"]


@default_on(verl07=NONE, verl09=NONE)
@not_on(VERL09, "the page shows those of verl 0.7's loss")
def test_the_page_shows_these_distances(run, distance):
    page = (REPO / "docs" / "trigger.md").read_text()
    shown = {mode: float(value) for mode, value in re.findall(r"^\| `(\w+)` \| (0\.\d+) \|", page, re.M)}
    assert shown == pytest.approx({mode: distance[mode] for mode in shown}, abs=0.05) and len(shown) == 3
    steps = [step for step in run["observe"][0]["steps"] if step["spikes"]]
    assert f"| {len(steps)} of {NUM_GROWING}, from {steps[0]['norm_over_threshold']:.1f} times the threshold" in page


@default_on(verl07=NONE, verl09=NONE)
def test_each_masked_step_says_its_norm_without_the_culprit_and_how_many_tokens_it_left_out(run):
    masked = [step for step in run["mask"][0]["steps"] if step["spikes"]]
    assert all(step["mask"] == step["masked_tokens"] == 1 and step["norm_after"] < 4 for step in masked)
    assert all(max(step["norms"]) < 4 for step in masked)  # what the optimizer took
    assert not any("masked_tokens" in step for step in run["observe"][0]["steps"])


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
