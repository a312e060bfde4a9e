# SPDX-License-Identifier: Apache-2.0
"""The parts of the gradient in verl's actor, on two ranks: they add up, and training is the same without the analysis.

Each part by itself is tested in test_parts.py.
"""

import pytest

from gradloc.analysis.buckets import bucket_cosines
from tests.trainers import NONE, default_on

RUN = "tests.analysis.scenarios."
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def actor(**settings):
    return [f"actor_rollout_ref.actor.{key}={value}" for key, value in settings.items()]


def loss_modes(*modes):
    return {mode: [f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"] for mode in modes}


SPLITS = {
    **{mode: actor(loss_agg_mode=mode) for mode in AGGREGATIONS},
    **loss_modes("gspo", "clip_cov", "kl_cov", "geo_mean", "gpg"),
    "fsdp1": actor(strategy="fsdp"),
    "fsdp1, original parameters": ["actor_rollout_ref.actor.fsdp_config.use_orig_params=True", *actor(strategy="fsdp")],
    "checkpointing": ["actor_rollout_ref.model.enable_gradient_checkpointing=True"],
    "dynamic micro-batches": actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=40),
    "one micro-batch": actor(ppo_micro_batch_size_per_gpu=8),
}


@default_on(verl07=("token-mean", "gpg"), verl09=("seq-mean-token-mean",))
@pytest.mark.parametrize("case", SPLITS)
def test_parts_of_unequal_buckets_add_up_to_the_training_gradient(world, dump_dir, case):
    for out in world.run(RUN + "split", overrides=SPLITS[case], dump_dir=dump_dir):
        assert out["training_norm"] > 0.01
        assert out["total_error"] < 1e-5
        assert out["task_error"] < 1e-5
        assert out["weights"] == pytest.approx([1.0, 1.0, 1.0])
        assert sum(out["losses"].values()) == pytest.approx(out["loss"], rel=1e-5)
        assert out["losses"]["task"] == pytest.approx(out["task_loss"], rel=1e-4, abs=1e-6)


@default_on(verl09=NONE)
def test_a_rank_without_a_row_of_the_bucket_keeps_its_peers_company(world, dump_dir):
    out = world.run(RUN + "split", overrides=[], dump_dir=dump_dir, buckets=[0] * 8 + [1] * 8)[0]
    assert out["total_error"] < 1e-5


@default_on(verl07=("quartiles",), verl09=("quartiles",))
@pytest.mark.parametrize("kind", ["buckets", "quartiles"])
def test_a_row_that_fills_up_the_ranks_weighs_nothing(world, dump_dir, kind):
    for overrides in ([], actor(ppo_micro_batch_size_per_gpu=1)):
        out = world.run(RUN + "with_filling_row", kind=kind, dump_dir=dump_dir, overrides=overrides)[0]
        assert out["same"]
        if kind == "buckets":
            assert sum(weights[0] for weights in out["weights"]) == pytest.approx(1.0)
        else:
            assert out["closure"] < 1e-5


def test_cosines_tell_agreeing_opposed_and_silent_buckets_apart(world, dump_dir):
    record = world.run(RUN + "dot_of_unlike_rows", dump_dir=dump_dir)[0]
    cosines = bucket_cosines(record)
    assert cosines[0][1] == pytest.approx(-1.0, abs=1e-5)
    assert cosines[0][2] is None
    assert record["norms"][2]["task"] == 0.0
    # 8 rows of advantage A against 4 of -2A: twice as many rows, half as strong
    assert record["norms"][0]["task"] == pytest.approx(record["norms"][1]["task"], rel=1e-4)
    # terms that carry no gradient cost no pass; 8 rows on rank 0, 4 of rank 1's: micro-batches of four rows
    assert record["terms"] == ["task"] and record["backwards"] == 2 + 1


CLIP = ("rule=adagc", "warmup=2", "relative_factor=1.01")
LAYOUTS = {
    "fsdp2": actor(),
    "fsdp1": actor(strategy="fsdp"),
    "fsdp1, original parameters": SPLITS["fsdp1, original parameters"],
    "dynamic": actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=40),
    "offloaded": ["actor_rollout_ref.actor.fsdp_config.offload_policy=true", *actor()],
    "adapters": ["lora"],
    "stabilized": [f"actor_rollout_ref.actor.gradloc.stabilize.layer_clip.{key}" for key in CLIP],
}


@default_on(verl07=("buckets-fsdp2",), verl09=("quartiles-fsdp2",))
@pytest.mark.parametrize(
    "kind, layout", [("buckets", "fsdp2"), ("buckets", "fsdp1"), *(("quartiles", layout) for layout in LAYOUTS)]
)
def test_training_with_the_analysis_is_bit_identical_to_training_without(world, dump_dir, kind, layout):
    given = dict(kind=kind, overrides=LAYOUTS[layout], dump_dir=dump_dir)
    on = world.run(RUN + "train", with_analysis=True, **given)
    off = world.run(RUN + "train", with_analysis=False, **given)
    for with_analysis, without in zip(on, off, strict=True):
        assert with_analysis.pop("analyses") == 2 and without.pop("analyses") == 0
        assert with_analysis.pop("steps_taken") == [True] * (8 if kind == "quartiles" else 0)
        assert without.pop("steps_taken") == []
        assert with_analysis == without


@default_on(verl07=("quartiles-fsdp2",), verl09=("buckets-fsdp2",))
@pytest.mark.parametrize("kind, layout", [("buckets", "fsdp2"), ("quartiles", "fsdp2"), ("quartiles", "fsdp1")])
def test_an_actor_in_the_middle_of_something_is_left_as_it_was_found(world, dump_dir, kind, layout):
    for out in world.run(RUN + "leave_as_found", kind=kind, overrides=LAYOUTS[layout], dump_dir=dump_dir):
        assert all(out.values()), out


@default_on(verl07=("buckets",), verl09=("quartiles",))
@pytest.mark.parametrize("kind", ["buckets", "quartiles"])
def test_a_failure_on_one_rank_is_told_to_all_and_training_goes_on(world, dump_dir, kind):
    for out in world.run(RUN + "fail_on_one_rank", kind=kind, dump_dir=dump_dir):
        assert "failed" in out["record"]["error"]
        assert out["is_same"]
    assert "ZeroDivisionError: no analysis today" in out["record"]["error"]
