# SPDX-License-Identifier: Apache-2.0
"""What a planted spike's event must say, and what training must leave, whatever the layout."""

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
TAU = f"{ACTOR}.grad_norm_threshold=640"
PLANTS = [(2, 3, -1e4), (11, 5, -8e3)]
MODES = pytest.mark.parametrize("mode", ["mask", pytest.param("observe", marks=pytest.mark.slow)])


def check_planted(world, dump_dir, plants, overrides, answered=None, **within):
    """Plant and update once; returns the event, held against the oracle as below, and what the scenario found."""
    given = {"plants": plants, "overrides": overrides, "dump_dir": dump_dir, "answered": answered}
    found, *_ = world.run("spikes.localize_planted", **given)
    (event,) = read_events(dump_dir)
    check_oracle(event, found, **within)
    return event, found


def check_oracle(event, found, share=1e-3, norm=1e-3, before=1e-4, after=2e-3, closure=0.05):
    """All that is planted is named, the rest is explained, and the numbers are the oracle's within these.

    ``share`` and ``closure`` are absolute, the norms of a culprit and ``before`` and ``after`` relative; None: unasked.
    """
    assert sorted((c["row"], c["positions"][0]) for c in event["culprits"]) == found["planted"]
    truth = zip(event["culprits"], found["oracle_shares"], found["oracle_culprit_norms"], strict=True)
    for culprit, true_share, true_norm in truth:
        assert culprit["share"] == pytest.approx(true_share, abs=share)
        assert culprit["grad_norm"] == pytest.approx(true_norm, rel=norm)
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=after)
    assert before is None or event["trigger"]["grad_norm"] == pytest.approx(found["oracle_norm"], rel=before)
    assert closure is None or event["shares"]["closure"] == pytest.approx(1, abs=closure)


def check_training(world, dump_dir, mode, spikes=2, **given):
    """``mask`` is training without the culprit, ``observe`` training with it and nobody looking; bit for bit."""
    twin = {"mask": "as_without", "observe": "as_spiked"}[mode]
    given |= {"overrides": [TAU, f"{ACTOR}.gradloc.action.mode={mode}"], "dump_dir": dump_dir, "twin": twin}
    found = world.run("actions.train_epochs", **given)
    assert all(rank["is_same"] for rank in found), "bit for bit"
    assert found[0]["metrics"]["gradloc/spikes"] == [spikes]
