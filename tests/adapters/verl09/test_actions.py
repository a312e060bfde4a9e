# SPDX-License-Identifier: Apache-2.0
"""What is done to a step that spikes, on verl 0.9."""

import pytest

from tests.world import RankError

from .test_localization import ACTOR, ON, PLANT, events_in
from .test_stock import LAYOUTS

ROW, POSITION, _ = PLANT
WITHOUT = ((ROW, POSITION, 0.0),)
EXACT = [name for name in LAYOUTS if name != "entropy and KL"]  # a token without advantage keeps these two terms


@pytest.mark.parametrize("layout", EXACT)
def test_mask_is_training_without_the_culprit_bit_for_bit(train, layout, tmp_path):
    settings = [*ON, *LAYOUTS[layout], f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.action.mode=mask"]
    without = train(LAYOUTS[layout], stock=True, plants=WITHOUT)
    masked = train(settings, plants=(PLANT,))
    for one, other in zip(without, masked, strict=True):
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    metrics = masked[0]["metrics"]
    assert metrics["gradloc/mask"] == metrics["gradloc/spikes"] > 0 and metrics["gradloc/failures"] == 0


def test_skip_takes_no_step(train, tmp_path):
    settings = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.action.mode=skip"]
    one_step, skipped = train(stock=True, num_steps=1), train(settings, plants=(PLANT,))
    assert [rank["weights"] for rank in one_step] == [rank["weights"] for rank in skipped]
    assert events_in(tmp_path)[0]["action"]["taken"] == "skip"


def test_abort_stops_the_run_with_the_event_on_disk(train, tmp_path):
    settings = [*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.action.mode=abort"]
    with pytest.raises(RankError, match="AbortedBySpike: gradloc stopped the run"):
        train(settings, plants=(PLANT,))
    assert events_in(tmp_path)[0]["action"]["taken"] == "abort"


def test_a_run_that_does_not_spike_is_that_of_verl_alone(train, tmp_path):
    stock, healthy = train(stock=True), train([*ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}"])
    assert [rank["weights"] for rank in stock] == [rank["weights"] for rank in healthy]
    metrics = healthy[0]["metrics"]
    assert 0 < metrics["gradloc/head_grad_norm"] < metrics["actor/grad_norm_max"] == healthy[0]["norms"][-1]
    assert metrics["gradloc/spikes"] == 0 and not (tmp_path / "events.jsonl").exists()
