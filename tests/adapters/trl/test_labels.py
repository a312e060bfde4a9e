# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT and DPO trainers: harmless, named, masked; and what they refuse."""

import pytest
import trl

import gradloc.trl
from tests.adapters.trl import labels
from tests.adapters.trl.conftest import events_in, named_in

SAME = ("weights", "optimizer", "norms")


@pytest.mark.parametrize("base", ["SFTTrainer", "DPOTrainer"])
def test_observing_changes_nothing_and_masking_is_training_without_the_token(tmp_path, base):
    def run(kind, folder="", **given):
        return labels.run(kind, str(tmp_path / (folder or kind)), base, **given)

    stock, without, observed = run("stock"), run("without"), run("watched")
    masked = run("watched", "masked", gradloc={"action": {"mode": "mask"}})
    assert [observed[key] for key in SAME] == [stock[key] for key in SAME]
    assert [masked[key] for key in SAME] == [without[key] for key in SAME] and masked["weights"] != stock["weights"]
    attached = run("attached", gradloc={"action": {"mode": "mask"}})
    assert [attached[key] for key in SAME] == [without[key] for key in SAME]
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == observed["where"] and event["certificate"]["verdict"] == "explained"
    assert event["cause"]["label"] == "loss_weight" and "of the document" in event["verdict"]
    assert event["run"]["trainer"].startswith("trl") and event["batch"]["loss_weight"] > 0
    assert sum(log.get("gradloc/spikes", 0) for log in observed["logs"]) == 1


def test_a_loss_that_asks_for_no_log_probs_trains_as_without_it(tmp_path):
    stock, watched = (
        labels.run(kind, str(tmp_path / kind), "SFTTrainer", is_own=True) for kind in ("stock", "watched")
    )
    assert [watched[key] for key in SAME] == [stock[key] for key in SAME] and not events_in(tmp_path / "watched")


@pytest.mark.parametrize(
    "config, said",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0 with gradloc"),
        ({"optim": "lomo"}, "optim must be an optimizer that steps once"),
    ],
)
def test_what_no_search_could_look_into_is_refused(tmp_path, config, said):
    with pytest.raises(ValueError, match=said):
        labels.run("watched", str(tmp_path), "SFTTrainer", **config)


def test_the_trainers_and_their_configs_stand_beside_the_others(tmp_path):
    assert issubclass(gradloc.trl.SFTTrainer, trl.SFTTrainer) and issubclass(gradloc.trl.DPOTrainer, trl.DPOTrainer)
    assert gradloc.trl.SFTConfig(str(tmp_path), gradloc="mask", use_cpu=True, bf16=False).gradloc == "mask"
