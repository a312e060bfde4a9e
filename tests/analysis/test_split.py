# SPDX-License-Identifier: Apache-2.0
"""The parts of the gradient, on two ranks: they are right, they add up, and nothing notices."""

import pytest

RUN = "tests.analysis.scenarios."
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def actor(**settings):
    return [f"actor_rollout_ref.actor.{key}={value}" for key, value in settings.items()]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_parts_of_unequal_buckets_add_up_to_the_training_gradient(world, dump_dir, mode):
    for out in world.run(RUN + "split", overrides=actor(loss_agg_mode=mode), dump_dir=dump_dir):
        assert out["training_norm"] > 0.01
        assert out["total_error"] < 1e-5
        assert out["task_error"] < 1e-5
        assert out["bucket_sum_error"] < 1e-5
        assert max(out["slow_errors"]) < 1e-5
        assert out["weights"] == pytest.approx([1.0, 1.0, 1.0])
        assert out["loss_sum"] == pytest.approx(out["loss"], rel=1e-5)


@pytest.mark.parametrize("loss_mode", ["gspo", "clip_cov", "kl_cov", "geo_mean"])
def test_parts_add_up_whatever_the_policy_loss(world, dump_dir, loss_mode):
    overrides = [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"]
    out = world.run(RUN + "split", overrides=overrides, dump_dir=dump_dir)[0]
    assert out["total_error"] < 1e-5
    assert out["task_error"] < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        actor(strategy="fsdp"),
        actor(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=40),
        actor(ppo_micro_batch_size_per_gpu=8),
    ],
    ids=["fsdp1", "dynamic micro-batches", "one micro-batch"],
)
def test_parts_add_up_however_the_batch_is_sharded_and_cut(world, dump_dir, overrides):
    out = world.run(RUN + "split", overrides=overrides, dump_dir=dump_dir)[0]
    assert out["total_error"] < 1e-5
    assert out["loss_sum"] == pytest.approx(out["loss"], rel=1e-5)


def test_a_rank_without_a_row_of_the_bucket_keeps_its_peers_company(world, dump_dir):
    assert world.run(RUN + "split_rows_of_one_rank", dump_dir=dump_dir)[0]["error"] < 1e-5


def test_a_row_that_fills_up_the_ranks_weighs_nothing(world, dump_dir):
    out = world.run(RUN + "split_odd", dump_dir=dump_dir, overrides=[])[0]
    assert out["difference"] == 0.0
    assert sum(weights[0] for weights in out["record"]["weights"]) == pytest.approx(1.0)


def test_cosines_tell_agreeing_opposed_and_silent_buckets_apart(world, dump_dir):
    from tests.analysis.pure import metrics

    record = world.run(RUN + "dot_of_unlike_rows", dump_dir=dump_dir)[0]["record"]
    cosines = metrics().bucket_cosines(record)
    assert cosines[0][1] == pytest.approx(-1.0, abs=1e-5)
    assert cosines[0][2] is None
    assert record["norms"][2]["task"] == 0.0
    # 8 rows of advantage A against 4 of -2A: twice as many rows, half as strong
    assert record["norms"][0]["task"] == pytest.approx(record["norms"][1]["task"], rel=1e-4)


def test_terms_that_carry_no_gradient_cost_no_pass(world, dump_dir):
    record = world.run(RUN + "dot_of_unlike_rows", dump_dir=dump_dir)[0]["record"]
    assert record["terms"] == ["task"]
    assert record["backwards"] == 2 + 1  # 8 rows on rank 0, 4 of rank 1's: micro-batches of four rows


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_training_with_the_analysis_is_bit_identical_to_training_without(world, dump_dir, strategy):
    overrides = actor(strategy=strategy)
    on = world.run(RUN + "train", overrides=overrides, dump_dir=dump_dir, with_analysis=True)
    off = world.run(RUN + "train", overrides=overrides, dump_dir=dump_dir, with_analysis=False)
    for with_analysis, without in zip(on, off, strict=True):
        assert with_analysis.pop("analyses") == 3 and without.pop("analyses") == 0
        assert with_analysis == without


def test_an_actor_in_the_middle_of_something_is_left_as_it_was_found(world, dump_dir):
    for out in world.run(RUN + "leave_as_found", dump_dir=dump_dir):
        assert out == {"gradients": True, "values": True, "mode": True, "count": True}


def test_a_failure_on_one_rank_is_told_to_all_and_training_goes_on(world, dump_dir):
    for out in world.run(RUN + "fail_on_one_rank", dump_dir=dump_dir):
        assert "failed" in out["record"]["error"]
        assert out["is_same"]
    assert "ZeroDivisionError: no loss today" in out["record"]["error"]
