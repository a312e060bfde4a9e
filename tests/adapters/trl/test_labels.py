# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT and DPO trainers: harmless, named, masked, under their own losses and others."""

import pytest
import trl

import gradloc.trl
from tests.adapters.trl import labels
from tests.adapters.trl.conftest import SAME, check_harmless, named_in
from tests.world.events import events_in


@pytest.fixture
def run(tmp_path):
    """``run(name, **given)``: :func:`labels.run`; events are in ``tmp_path / "watched"``."""
    return lambda name, folder="", base="SFTTrainer", **given: labels.run(
        name, str(tmp_path / (folder or name)), base, **given
    )


@pytest.mark.parametrize("base", ["SFTTrainer", "DPOTrainer"])
def test_observing_changes_nothing_and_masking_is_training_without_the_token(run, tmp_path, base):
    (observed,) = check_harmless(run, {}, {}, base=base)
    attached, without = (
        run(name, "again", base, gradloc={"action": {"mode": "mask"}}) for name in ("attached", "without")
    )
    assert [attached[key] for key in SAME] == [without[key] for key in SAME]
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == observed["where"] and event["certificate"]["verdict"] == "explained"
    assert event["cause"]["label"] == "loss_weight" and "of the document" in event["verdict"]
    assert event["run"]["trainer"].startswith("trl") and event["batch"]["loss_weight"] > 0
    assert sum(log.get("gradloc/spikes", 0) for log in observed["logs"]) == 1


def test_the_token_is_named_where_a_loss_of_the_users_own_smooths_labels(run, tmp_path):
    stock, watched = (run(name, is_own=True) for name in ("stock", "watched"))
    assert [watched[key] for key in SAME] == [stock[key] for key in SAME]
    (event,) = events_in(tmp_path / "watched")
    assert named_in([event]) == watched["where"] and event["certificate"]["verdict"] == "explained"


def test_label_smoothing_is_no_part_that_a_search_lacks(run, tmp_path):
    given = {"gradloc": {"trigger": {"tau": 1e-3}}, "label_smoothing_factor": 0.1, "max_steps": 1}
    stock, watched = (run(name, **given) for name in ("stock", "watched"))
    assert [watched[key] for key in SAME] == [stock[key] for key in SAME]
    (event,) = events_in(tmp_path / "watched")
    assert "cannot" not in event["verdict"] and event["shares"]["closure"] == pytest.approx(1.0, abs=0.01)


def test_what_no_search_could_look_into_is_refused(run):
    with pytest.raises(ValueError, match="optim must be an optimizer that steps once"):
        run("watched", optim="lomo")


def test_the_trainers_and_their_configs_stand_beside_the_others(tmp_path):
    assert issubclass(gradloc.trl.SFTTrainer, trl.SFTTrainer) and issubclass(gradloc.trl.DPOTrainer, trl.DPOTrainer)
    assert gradloc.trl.SFTConfig(str(tmp_path), gradloc="mask", use_cpu=True, bf16=False).gradloc == "mask"
