# SPDX-License-Identifier: Apache-2.0
"""Two stages on the real actor: parts of the ordinary gradient, in order, nothing else changed."""

import numpy as np
import pytest

from tests.trainers import NONE, VERL09, default_on, not_on

ACTOR = "actor_rollout_ref.actor"
KL = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1"]
TERMS = [*KL, f"{ACTOR}.entropy_coeff=0.05"]
TWO_MINI_BATCHES = [f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"]
FSDP1 = [f"{ACTOR}.strategy=fsdp"]
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=40"]
LAYOUTS = {
    "FSDP2": TWO_MINI_BATCHES,
    "FSDP1": FSDP1 + TWO_MINI_BATCHES,
    "entropy and KL": TERMS + TWO_MINI_BATCHES,
    "FSDP1, KL": FSDP1 + KL + TWO_MINI_BATCHES,
    "dynamic batch size, KL": DYNAMIC + KL + TWO_MINI_BATCHES,
    "sequence means": [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", *KL, *TWO_MINI_BATCHES],
    "the shortcut that takes the current log-probs for the old": [*TERMS, "algorithm.lopti.quantile=0.5"],
}


@default_on(verl07=("FSDP1", "sequence means"), verl09=("entropy and KL",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_frozen_weights_the_stages_add_up_to_the_ordinary_gradient(world, dump_dir, layout):
    given = dict(overrides=LAYOUTS[layout], dump_dir=dump_dir, uses_own_probs="shortcut" in layout)
    for rank in world.run("tests.reweighting.scenarios.stage_gradients", **given):
        assert rank["error"] < 1e-5
        assert all(norm > 0 for norm in rank["norms"])
        assert rank["batch_is_intact"]


def test_the_metrics_of_the_stages_are_told_apart_and_their_losses_add_up(world, dump_dir):
    """A list over micro-batches and ranks on verl 0.7; verl 0.9's trainer has reduced each to a number."""
    run = "tests.reweighting.scenarios.stage_gradients"
    found = world.run(run, overrides=TERMS + TWO_MINI_BATCHES, dump_dir=dump_dir)[0]
    both, ordinary = found["metrics"], found["ordinary_metrics"]
    for name in ("pg_loss", "kl_loss"):
        whole = np.mean(both[f"actor/{name}"])
        assert whole == pytest.approx(np.mean(ordinary[f"actor/{name}"]), rel=1e-5, abs=1e-7)
        parts = [np.mean(both[f"lopti/{stage}/{name}"]) for stage in ("low", "high")]
        assert sum(parts) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    assert sum(np.sum(both[f"lopti/{stage}/share"]) for stage in ("low", "high")) == pytest.approx(1)
    assert all(np.min(both[f"lopti/{stage}/grad_norm"]) > 0 for stage in ("low", "high"))


@default_on(verl07=("0.4",), verl09=("-0.4",))
@pytest.mark.parametrize("eta", [0.4, -0.4])
def test_it_is_two_updates_one_after_the_other_in_the_order_of_etas_sign(world, dump_dir, eta):
    for rank in world.run("tests.reweighting.scenarios.by_hand", dump_dir=dump_dir, eta=eta):
        assert rank["ours"] == rank["by_hand"]


@default_on(verl07=NONE)
def test_reweighting_changes_the_update_and_runs_together_with_lopti(world, dump_dir):
    reweighted = ["algorithm.advantage_reweighting.alpha=0.3"]
    lopti = ["algorithm.lopti.enable=true", "algorithm.lopti.quantile=0.5"]
    weights = {
        world.run("spikes.train", overrides=overrides, dump_dir=dump_dir, num_steps=2)[0]["weights"]
        for overrides in ([], reweighted, lopti, reweighted + lopti)
    }
    assert len(weights) == 4


@default_on(verl07=("low",), verl09=("high",))
@pytest.mark.parametrize("stage", ["low", "high"])
def test_the_localizer_finds_a_spike_in_the_stage_that_it_is_in(world, dump_dir, stage):
    found = world.run("tests.reweighting.scenarios.spike", dump_dir=dump_dir, stage=stage)[0]
    assert found["events"] == [({found["planted"]}, stage, "explained")]
    assert found["metrics"]["gradloc/events"] == [1]


@default_on(verl07=("false-expected0",), verl09=NONE)
@not_on(VERL09, "the schedule is that of verl 0.7's worker")
@pytest.mark.parametrize("each, expected", [("false", [1 / 2, 1 / 3, 1 / 3]), ("true", [1 / 3, 1 / 5, 1 / 5])])
def test_the_learning_rate_advances_once_a_step_or_with_each_stage_and_not_with_an_analysis(
    world, dump_dir, each, expected
):
    for found in world.run("tests.reweighting.scenarios.rates", each_stage=each, dump_dir=dump_dir):
        assert found == pytest.approx(expected)
