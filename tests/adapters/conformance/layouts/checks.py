# SPDX-License-Identifier: Apache-2.0
"""Check the event of a planted spike, and what training leaves, whatever the layout."""

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


def check_training(world, dump_dir, mode, spikes=2, settings=(), **given):
    """``mask`` is training without the culprit, ``observe`` training with it and nobody looking: weights, optimizer and
    random numbers, bit for bit. Returns the metrics of ours."""
    given |= {"overrides": [TAU, f"{ACTOR}.gradloc.action.mode={mode}", *settings], "dump_dir": dump_dir}
    found = world.run("actions.train_epochs", lets_out=mode == "mask", **given)
    assert all(rank["is_same"] for rank in found), "bit for bit"
    metrics = found[0]["metrics"]
    assert metrics["gradloc/spikes"] == [spikes] and metrics["gradloc/mask"] == [spikes * (mode == "mask")]
    return metrics


ONE_STEP = [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.policy_loss.loss_mode=vanilla"]


def check_masked_step(world, dump_dir, layout, dropout=0.0):
    """One step, with a culprit on each of two ranks."""
    plants = [(2, 3, 1e4), (5, 4, 1e4)]
    given = {"layout": [*ONE_STEP, f"{ACTOR}.grad_clip=0.5", *layout], "plants": plants, "dropout": dropout}
    metrics = check_training(world, dump_dir, "mask", spikes=1, **given)
    (over,), (threshold,) = metrics["gradloc/norm_over_threshold"], metrics["gradloc/threshold"]
    assert over * threshold > 100 * metrics["gradloc/norm_after"][0], "the plant mattered"
