# SPDX-License-Identifier: Apache-2.0
"""The trainer's side on two ranks: files, metrics, odd batches, the filter, and a batch of its own."""

import pytest

from tests.world.events import validate

RUN = "tests.analysis.trainer."
MIXED = [0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7.0]


def rollout(**settings):
    return [f"actor_rollout_ref.rollout.{key}={value}" for key, value in settings.items()]


def analyse(world, dump_dir, rewards=MIXED, per_group=2, overrides=()):
    given = dict(rewards=rewards, per_group=per_group, overrides=list(overrides))
    return world.run(RUN + "analyse", kind="gradient", dump_dir=dump_dir, **given)[0]


def test_an_analysis_logs_writes_and_leaves_the_batch_alone(world, dump_dir):
    out = analyse(world, dump_dir)
    assert out["ends"] is False
    assert out["vital"] == ["RayError"], "a lost worker ends the run"
    assert out["batch_is_same"]
    assert out["files"] == ["group_rv_table_step_1.csv", "step_1.json"]
    assert out["tables"] == [f"grad_norm/bucket_{number}/group_rv_table" for number in range(1, 7)]
    metrics, record = out["metrics"], out["record"]
    assert [bucket["name"] for bucket in record["buckets"]] == [*(f"bucket_{number}" for number in range(1, 7)), "all"]
    assert metrics["grad_norm/all/sample_count"] == 16
    assert metrics["grad_norm/bucket_1/sample_count"] == 4
    assert metrics["grad_norm/bucket_6/sample_count"] == 2
    assert metrics["actor/grad_norm/task"] == metrics["grad_norm/all/task"] > 0
    assert metrics["grad_analysis/zero_variance_share"] == pytest.approx(1 / 8)
    assert metrics["grad_analysis/failures"] == 0
    assert out["timing"]["gradient_analysis"] > 0
    assert all(record["metrics"][name] == metrics[name] for name in record["metrics"])
    validate("gradient_analysis", record)
    deviations = [group["reward_std"] for group in record["groups"]]
    assert deviations == sorted(deviations)


@pytest.mark.parametrize(
    "rewards, per_group, settings, counts",
    [
        (MIXED, 16, {}, [16]),
        ([1.0] * 16, 2, {"gradient_analysis_num_buckets": 3}, [6, 6, 4]),
        (MIXED, 2, {"gradient_analysis_bucket_mode": "fixed_rv"}, [4, 2, 4, 2, 4]),
        (MIXED[:15], 3, {"gradient_analysis_num_buckets": 2}, [9, 6]),
    ],
    ids=["one group", "all rewards equal", "fixed buckets", "rows that do not divide among the ranks"],
)
def test_odd_batches_are_analysed_all_the_same(world, dump_dir, rewards, per_group, settings, counts):
    record = analyse(world, dump_dir, rewards, per_group, rollout(**settings))["record"]
    validate("gradient_analysis", record)
    *buckets, whole = record["buckets"]
    assert [bucket["num_rows"] for bucket in buckets] == counts
    assert whole["num_rows"] == len(rewards)
    assert sum(bucket["weight"]["task"] for bucket in buckets) == pytest.approx(1.0)
    assert whole["norm"]["task"]["own"] > 0


def test_nothing_is_built_while_both_features_are_off(single, dump_dir):
    assert not single.run(RUN + "is_built", dump_dir=dump_dir, overrides=[])[0]
    assert single.run(RUN + "is_built", dump_dir=dump_dir, overrides=rollout(rollout_filter_value=0.5))[0]


def test_the_run_is_to_end_after_the_analysis_where_asked(world, dump_dir):
    out = analyse(world, dump_dir, overrides=["trainer.exit_after_gradient_analysis=True"])
    assert out["ends"] is True
    assert out["metrics"]["trainer/exited_after_gradient_analysis"] == 1.0
    assert out["metrics"]["training/global_step"] == 1
    assert out["metrics"]["timing_s/gradient_analysis"] > 0


def filtered(world, dump_dir, rewards=MIXED, per_group=2, scaling="none", **settings):
    overrides = rollout(**{f"rollout_filter_{key}": value for key, value in settings.items()})
    overrides.append(f"actor_rollout_ref.actor.filter_loss_scaling={scaling}")
    given = dict(rewards=rewards, per_group=per_group, overrides=overrides)
    out = world.run(RUN + "filter_rows", dump_dir=dump_dir, **given)[0]
    assert out["is_in_step"]
    assert not out["has_scores"]
    assert out["rewards"] == out["extras"] == [rewards[row] for row in out["rows"]]
    return out


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_the_filter_keeps_scores_and_extras_in_step_balances_what_is_left_and_scales_it(
    world, dump_dir, scaling, factor
):
    out = filtered(world, dump_dir, strategy="top_k", value=0.5, scaling=scaling)
    assert sorted(out["rows"]) == list(range(8, 16))
    assert out["balanced"] == 1
    assert out["tokens"] == out["expected_tokens"]
    assert out["scale"] == pytest.approx(factor)
    assert out["metrics"]["rollout/filter_kept_count"] == 4
    assert out["metrics"]["rollout/filter_kept_ratio"] == 0.5
    assert out["metrics"]["rollout/filter_zero_count"] == 1
    assert out["metrics"]["rollout/zero_variance_share"] == pytest.approx(1 / 8)


def test_a_filter_that_would_leave_nothing_keeps_everything(world, dump_dir):
    out = filtered(world, dump_dir, rewards=[1.0] * 16, include_zero=False, scaling="linear")
    assert out["rows"] == list(range(16))
    assert out["metrics"]["rollout/filter_empty"] == 1.0
    assert out["metrics"]["rollout/filter_kept_ratio"] == 1.0
    assert out["scale"] == 1.0
    assert out["balanced"] == 0


def test_the_next_best_group_stays_where_rows_would_not_divide_among_the_ranks(world, dump_dir):
    rewards = [0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 4.0]
    out = filtered(world, dump_dir, rewards=rewards, per_group=3, strategy="top_k", value=0.25)
    assert sorted(out["rows"]) == list(range(6, 12))


def test_the_separate_batch_walks_through_verls_loop_and_leaves_the_trainer_alone(single, dump_dir):
    out = single.run(RUN + "prepare_separate", dump_dir=dump_dir)[0]
    assert out["seen"] == {"step": 7, "n": 3, "logger": [], "validates": False, "epochs_left": 2}
    first, again, other = out["batches"]
    assert len(set(first)) == 4 and set(first) <= set(range(100, 200))
    assert first == again != other
    assert (out["n"], out["steps"], out["is_loader_same"]) == (1, 7, True)
    assert out["logger"]
