# SPDX-License-Identifier: Apache-2.0
"""token_clip and seq_clip: the weights, the loss they make, and localization through them."""

import pytest

from tests.stabilize.test_actor import ACTOR, FSDP1, LOG_PROBS, STABILIZE
from tests.trainers import default_on
from tests.world.events import read_events

ON = [f"{ACTOR}.grad_norm_threshold=640"]
CLIPS = {
    "token_clip masks above": ["token_clip.mode=mask", "token_clip.upper=2.0"],
    "token_clip clamps on both sides": ["token_clip.mode=clamp", "token_clip.upper=1.5", "token_clip.lower=0.5"],
    "seq_clip masks on both sides": ["seq_clip.mode=mask", "seq_clip.upper=1.2", "seq_clip.lower=0.8"],
    "seq_clip clamps below": ["seq_clip.mode=clamp", "seq_clip.upper=null", "seq_clip.lower=0.9"],
    "both": ["token_clip.mode=clamp", "token_clip.upper=2.0", "seq_clip.mode=clamp"],
}


@default_on(verl07=("token_clip clamps on both sides-FSDP2", "seq_clip clamps below-FSDP1"), verl09=("both-FSDP2",))
@pytest.mark.parametrize("layout", [[], FSDP1], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("clips", CLIPS)
def test_the_actor_trains_on_verls_loss_times_the_slow_weights(world, dump_dir, clips, layout):
    overrides = [f"{STABILIZE}.{clip}" for clip in CLIPS[clips]]
    for found in world.run(
        "tests.stabilize.scenarios.loss_under",
        overrides=LOG_PROBS + overrides,
        layout=layout,
        dump_dir=dump_dir,
    ):
        assert found["num_changed"] > 3
        assert found["norm"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["norm"] != pytest.approx(found["unclipped"], rel=1e-3)
        for name in ("token_clip", "seq_clip"):
            keys = {key for key in found["metrics"] if key.startswith(f"gradloc/{name}/")}
            is_on = any(clip.startswith(name) for clip in CLIPS[clips])
            expected = ("share", "ratio_max", "ratio_min") if is_on else ()
            assert keys == {f"gradloc/{name}/{key}" for key in expected}


LOCALIZED = {
    "FSDP2": [],
    "FSDP1": FSDP1,
    "FSDP2, bisect": [f"{ACTOR}.gradloc.search.strategy=bisect"],
    "FSDP2, gspo": [f"{ACTOR}.policy_loss.loss_mode=gspo"],
}


@default_on(verl07=("FSDP2, gspo",), verl09=("FSDP1",))
@pytest.mark.parametrize("layout", LOCALIZED)
def test_planted_culprits_are_found_through_the_clips_with_their_true_norms(world, dump_dir, layout):
    clips = [
        *LOG_PROBS,
        f"{STABILIZE}.token_clip.mode=clamp",
        f"{STABILIZE}.token_clip.upper=1.5",
        f"{STABILIZE}.seq_clip.mode=clamp",
        f"{STABILIZE}.layer_clip.rule=adagc",
    ]
    found, _ = world.run(
        "spikes.localize_planted",
        plants=[(2, 3, -1e4), (11, 5, -8e3)],
        overrides=ON + clips + LOCALIZED[layout],
        dump_dir=dump_dir,
        rollout_noise=0.5,
    )
    (event,) = read_events(dump_dir)
    named = {(culprit["row"], culprit["positions"][0]) for culprit in event["culprits"]}
    assert sorted(named) == found["planted"]
    assert event["trigger"]["grad_norm"] == pytest.approx(found["oracle_norm"], rel=1e-3)
    for culprit, share, norm in zip(
        event["culprits"], found["oracle_shares"], found["oracle_culprit_norms"], strict=True
    ):
        assert culprit["grad_norm"] == pytest.approx(norm, rel=1e-3)
        if "bisect" not in layout:
            assert culprit["share"] == pytest.approx(share, abs=1e-3)
    assert event["certificate"]["verdict"] == "explained"
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=2e-3)
