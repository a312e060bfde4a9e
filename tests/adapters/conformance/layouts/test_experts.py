# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: a token's way through them is part of what is looked into, and their routers' choice jumps."""

import pytest

from tests.adapters.conformance.layouts.checks import ACTOR, PLANTS, TAU, check_planted, check_training
from tests.trainers import NONE, default_on

QWEN, MIXTRAL = ["experts=qwen3_moe"], ["experts=mixtral", f"{ACTOR}.strategy=fsdp"]


@default_on(verl07=NONE, verl09=("Qwen3-MoE, FSDP2",))
@pytest.mark.parametrize(
    "layout", [QWEN, pytest.param(MIXTRAL, marks=pytest.mark.slow)], ids=["Qwen3-MoE, FSDP2", "Mixtral, FSDP1"]
)
def test_the_planted_culprits_are_the_oracles_and_the_whole_gradient_is_the_tokens(world, dump_dir, layout):
    """Their forward computes the balancing loss, too; verl takes the logits alone, so it is no part of the step."""
    check_planted(world, dump_dir, PLANTS, [TAU, *layout], closure=2e-3)


@default_on(verl07=NONE, verl09=NONE)
@pytest.mark.parametrize(("layout", "mode"), [(MIXTRAL, "mask"), pytest.param(QWEN, "observe", marks=pytest.mark.slow)])
def test_masking_is_training_without_the_culprit_and_observing_changes_nothing(world, dump_dir, layout, mode):
    check_training(world, dump_dir, mode, layout=layout)


@default_on(verl07=NONE)
def test_moving_the_weights_does_not_send_a_token_to_other_experts(world, dump_dir):
    """Sequences whose advantages are 10 000 times too large, and experts that matter: a token whose router changes its
    mind between the two legs would be given a share of its own, and closures from -0.1 to 3 were seen."""
    found, _ = world.run("tests.world.models.experts.closures", overrides=[TAU], dump_dir=dump_dir, seeds=[2, 4, 6])
    assert all(0.98 < closure < 1.02 for closure in found), found
