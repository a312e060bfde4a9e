# SPDX-License-Identifier: Apache-2.0
"""Activation offload, whose handler counts forwards: a search's own leave it and the training as they were."""

import pytest

from tests.adapters.conformance.layouts.checks import PLANTS, TAU, check_masked_step, check_planted
from tests.adapters.verl09.conftest import HARNESS
from tests.adapters.verl09.test_localization import ACTOR, ON, PLANT

MODEL = "actor_rollout_ref.model"
OFFLOAD = [f"{MODEL}.enable_activation_offload=true", f"{MODEL}.enable_gradient_checkpointing=true"]


class Offloaded:
    """A world in which a scenario's activations are offloaded."""

    def __init__(self, world):
        self.world = world

    def run(self, scenario, overrides, **given):
        scenario = scenario if scenario.startswith("tests.") else f"tests.world.{scenario}"
        given |= {"scenario": scenario, "overrides": [*OFFLOAD, *overrides]}
        found = self.world.run("tests.adapters.verl09.layouts.offload.run", **given)
        assert all(each["offloaded"] for each in found)
        return [each["found"] for each in found]


@pytest.fixture
def offloaded(world):
    return Offloaded(world)


@pytest.mark.parametrize("layout", [[], pytest.param(["experts=qwen3_moe"], marks=pytest.mark.slow)])
def test_the_planted_culprits_are_the_oracles(offloaded, dump_dir, layout):
    check_planted(offloaded, dump_dir, PLANTS, [TAU, *layout], closure=0.01)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fails_at", ["loss", *(pytest.param(place, marks=pytest.mark.slow) for place in (None, "layer"))]
)
def test_looking_on_changes_nothing_also_where_a_pass_of_the_search_fails(
    offloaded, world, tmp_path, strategy, fails_at
):
    folder = str(tmp_path / "model")
    world.run("tests.adapters.verl09.layouts.offload.save_deeper", folder=folder)
    given = {"scenario": f"{HARNESS}.train", "model_dir": folder, "plants": (PLANT,)}
    layout = [f"{ACTOR}.strategy={strategy}", f"{ACTOR}.ppo_epochs=2"]  # training goes on after the search
    stock = offloaded.run(overrides=layout, stock=True, **given)
    watched = offloaded.run(
        overrides=[*ON, *layout, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], fails_at=fails_at, **given
    )
    for one, other in zip(stock, watched, strict=True):
        assert one["weights"] == other["weights"] and one["rng"] == other["rng"]
    assert watched[0]["metrics"]["gradloc/failures"] == bool(fails_at)


@pytest.mark.slow
def test_a_masked_step_is_training_without_the_culprits_bit_for_bit(offloaded, dump_dir):
    check_masked_step(offloaded, dump_dir, OFFLOAD, dropout=0.1)
