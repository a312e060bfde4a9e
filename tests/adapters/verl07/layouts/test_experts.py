# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a token's way through them is part of what is looked into, and their routers' choice jumps."""

import pytest

from tests.world.events import read_events

ACTOR = "actor_rollout_ref.actor"
TAU = [f"{ACTOR}.grad_norm_threshold=640"]
PLANTS = [(2, 3, -1e4), (11, 5, -8e3)]
MIXTRAL = ["experts=mixtral", f"{ACTOR}.strategy=fsdp"]


@pytest.mark.parametrize(
    "layout",
    [["experts=qwen3_moe"], pytest.param(MIXTRAL, marks=pytest.mark.slow)],
    ids=["Qwen3-MoE, FSDP2", "Mixtral, FSDP1"],
)
def test_the_planted_culprits_are_the_oracles_and_the_whole_gradient_is_the_tokens(world, dump_dir, layout):
    """Their forward computes the balancing loss, too; verl takes the logits alone, so it is no part of the step."""
    found, _ = world.run("spikes.localize_planted", plants=PLANTS, overrides=TAU + layout, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    named = sorted((culprit["row"], culprit["positions"][0]) for culprit in event["culprits"])
    assert named == found["planted"] and event["certificate"]["verdict"] == "explained"
    assert event["trigger"]["grad_norm"] == pytest.approx(found["oracle_norm"], rel=1e-4)
    assert event["certificate"]["norm_after"] == pytest.approx(found["oracle_norm_without"], rel=2e-3)
    for culprit, share in zip(event["culprits"], found["oracle_shares"], strict=True):
        assert culprit["share"] == pytest.approx(share, abs=1e-3)
    assert event["shares"]["closure"] == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize(
    ("layout", "mode"), [(MIXTRAL, "mask"), pytest.param(["experts=qwen3_moe"], "observe", marks=pytest.mark.slow)]
)
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, layout, mode):
    settings = [*TAU, f"{ACTOR}.gradloc.action.mode={mode}"]
    found, other = world.run("actions.train_epochs", overrides=settings, dump_dir=dump_dir, layout=layout)
    same = {"mask": "as_without", "observe": "as_spiked"}[mode]
    assert found[same] and other[same], "bit for bit"
    assert found["metrics"]["gradloc/spikes"] == [3]


def test_moving_the_weights_does_not_send_a_token_to_other_experts(world, dump_dir):
    """Sequences whose advantages are 10 000 times too large, and experts that matter: a token whose router changes its
    mind between the two legs would be given a share of its own, and closures from -0.1 to 3 were seen."""
    found, _ = world.run("tests.world.models.experts.closures", overrides=TAU, dump_dir=dump_dir, seeds=[2, 4, 6])
    assert all(0.98 < closure < 1.02 for closure in found), found
