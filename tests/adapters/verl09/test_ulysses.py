# SPDX-License-Identifier: Apache-2.0
"""One sequence on several ranks: every token counts once, and what is found is what is found without."""

import json

import pytest

from .test_localization import ACTOR, ON, PLANT, events_in


def found_in(folder):
    *_, event = events_in(folder)
    held = json.loads((folder / event["folder"] / "sequences.json").read_text())
    shares = {sequence["row"]: sequence["share"] for sequence in held["sequences"]}
    return event, shares


def test_shares_and_certificate_agree_with_those_without_it(train, four_engines, model_dir, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    one = train([*ON, f"{ACTOR}.gradloc.dump_dir={alone}"], plants=(PLANT,))
    four = four_engines.run(
        "tests.adapters.verl09.ulysses.train_in_parallel",
        overrides=[*ON, f"{ACTOR}.gradloc.dump_dir={shared}"],
        model_dir=str(model_dir),
        plants=(PLANT,),
    )
    assert four[0]["norms"] == pytest.approx(one[0]["norms"], rel=1e-4)
    (event, shares), (expected, expected_shares) = found_in(shared), found_in(alone)
    assert event["step"]["sp_size"] == 2 and event["step"]["dp_size"] == 2
    assert [(c["row"], c["positions"]) for c in event["culprits"]] == [(5, [3])]
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(expected["certificate"]["norm_after"], rel=1e-3)
    assert event["shares"]["closure"] == pytest.approx(1, abs=0.01)
    assert shares[5] == pytest.approx(expected_shares[5], abs=2e-3)


def test_mask_is_training_without_the_culprit(four_engines, model_dir, tmp_path):
    def run(plants, *overrides):
        run_in = "tests.adapters.verl09.ulysses.train_in_parallel"
        return four_engines.run(run_in, overrides=list(overrides), model_dir=str(model_dir), plants=plants)

    row, position, _ = PLANT
    without = run(((row, position, 0.0),))
    masked = run((PLANT,), *ON, f"{ACTOR}.gradloc.dump_dir={tmp_path}", f"{ACTOR}.gradloc.action.mode=mask")
    assert masked[0]["metrics"]["gradloc/mask"] == 1
    assert [rank["weights"] for rank in without] == [rank["weights"] for rank in masked]
