# SPDX-License-Identifier: Apache-2.0
"""Activation offload, whose handler counts forwards: a search's own leave it and the training as they were."""

import pytest

from tests.adapters.same.layouts.checks import PLANTS, TAU, check_oracle
from tests.adapters.verl09.conftest import HARNESS
from tests.adapters.verl09.test_localization import ACTOR, ON, PLANT
from tests.world.events import read_events

MODEL = "actor_rollout_ref.model"
OFFLOAD = [f"{MODEL}.enable_activation_offload=true", f"{MODEL}.enable_gradient_checkpointing=true"]


@pytest.fixture
def run(world):
    """``run(scenario, overrides, ...)``: what each rank returns; activations were offloaded."""

    def offloaded(scenario, overrides, **given):
        found = world.run(
            "tests.adapters.verl09.layouts.offload.run", scenario=scenario, overrides=[*OFFLOAD, *overrides], **given
        )
        assert all(each["offloaded"] for each in found)
        return found

    return offloaded


@pytest.mark.parametrize("layout", [[], pytest.param(["experts=qwen3_moe"], marks=pytest.mark.slow)])
def test_the_planted_culprits_are_the_oracles(run, dump_dir, layout):
    (one, _) = run("tests.world.spikes.localize_planted", [TAU, *layout], plants=PLANTS, dump_dir=dump_dir)
    (event,) = read_events(dump_dir)
    check_oracle(event, one["found"], closure=0.01)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fails_at", ["loss", *(pytest.param(place, marks=pytest.mark.slow) for place in (None, "layer"))]
)
def test_looking_on_changes_nothing_also_where_a_pass_of_the_search_fails(run, world, tmp_path, strategy, fails_at):
    folder = str(tmp_path / "model")
    world.run("tests.adapters.verl09.layouts.offload.save_deeper", folder=folder)
    given = {"scenario": f"{HARNESS}.train", "model_dir": folder, "plants": (PLANT,)}
    of_run = [f"{ACTOR}.strategy={strategy}", f"{ACTOR}.ppo_epochs=2"]  # training goes on after the search
    stock = run(overrides=of_run, stock=True, **given)
    watched = run(overrides=[*ON, *of_run, f"{ACTOR}.gradloc.dump_dir={tmp_path}"], fails_at=fails_at, **given)
    for one, other in zip(stock, watched, strict=True):
        assert one["found"]["weights"] == other["found"]["weights"] and one["found"]["rng"] == other["found"]["rng"]
    assert watched[0]["found"]["metrics"]["gradloc/failures"] == bool(fails_at)


@pytest.mark.slow
def test_a_masked_step_is_training_without_the_culprits_bit_for_bit(run, dump_dir):
    given = {"plants": [(5, 3, 1e4), (12, 4, 1e4)], "dump_dir": dump_dir, "dropout": 0.1}
    for answer in run("tests.world.identities.masked_step", [TAU], **given):
        masked, wanted = answer["found"]["masked"], answer["found"]["wanted"]
        assert masked["event"]["action"]["taken"] == "mask"
        assert masked["weights"] == wanted["weights"] and masked["rng"] == wanted["rng"]
