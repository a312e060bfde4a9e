# SPDX-License-Identifier: Apache-2.0
"""Distillation's losses on log-probs: a token that the teacher thinks otherwise of is found, certified and masked."""

import pytest

from tests.adapters.conformance import test_cures
from tests.adapters.conformance.layouts.checks import PLANTS, TAU, check_masked_step, check_oracle, check_training
from tests.adapters.verl09.harness import DISTILLED
from tests.world.events import read_events

LOSS = "distillation.distillation_loss"
AS_REWARD = [*DISTILLED, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true"]
SUPERVISED = [*DISTILLED, f"{LOSS}.loss_mode=k2"]


@pytest.mark.parametrize("layout", [AS_REWARD, SUPERVISED], ids=["k1 as a reward", "k2 backpropagated"])
def test_the_planted_culprits_are_the_oracles_and_the_teacher_is_their_cause(world, dump_dir, layout):
    found, _ = world.run("spikes.localize_planted", plants=PLANTS, overrides=[TAU, *layout], dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    check_oracle(event, found, closure=2e-3)
    for culprit in event["culprits"]:
        values = culprit["values"]
        gap = values["teacher_log_prob"] - values["log_prob"]
        assert "advantage" not in values and culprit["cause"]["label"] == "teacher_gap"
        assert culprit["cause"]["numbers"]["gap_over_typical"] == pytest.approx(-gap / event["batch"]["teacher_gap"])
        assert gap == pytest.approx({row: size for row, _, size in PLANTS}[culprit["row"]], rel=1e-3)
        # of k1 as a reward, where the ratio is 1, and of k2 the derivative is the distance, times the token's weight
        assert values["coefficient"] == pytest.approx(-gap * values["loss_weight"], rel=1e-5)
    assert "Student and teacher disagree about a token" in event["verdict"]


def test_a_masked_step_is_training_without_the_culprits_bit_for_bit(world, dump_dir):
    check_masked_step(world, dump_dir, AS_REWARD)


@pytest.mark.slow
def test_the_clamp_on_the_teachers_distance_is_measured_to_heal_it(world, dump_dir):
    cures = test_cures.check(world, dump_dir, "advantage", *SUPERVISED, f"{LOSS}.loss_max_clamp=null")
    assert [name for name, cure in cures.items() if cure["verdict"] == "healed"] == ["clamp_teacher"]


def test_looking_on_changes_nothing(world, dump_dir):
    check_training(world, dump_dir, "observe", layout=SUPERVISED)
