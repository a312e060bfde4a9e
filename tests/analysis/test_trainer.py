# SPDX-License-Identifier: Apache-2.0
"""The trainer's side on two ranks: files, metrics, odd batches, the filter, and a batch of its own."""

import math

import pytest

from tests.world.events import validate

RUN = "tests.analysis.trainer."
MIXED = [0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7.0]
SPLIT = "trainer.quartile_analysis_split="
SAMPLE = "trainer.quartile_analysis_num_tokens="


def rollout(**settings):
    return [f"actor_rollout_ref.rollout.{key}={value}" for key, value in settings.items()]


def analyse(world, dump_dir, *overrides, kind="gradient", rewards=MIXED, per_group=2, has_advantages=True):
    """The first rank's answer; its record is valid."""
    given = dict(rewards=rewards, per_group=per_group, kind=kind, has_advantages=has_advantages)
    out = world.run(RUN + "analyse", dump_dir=dump_dir, overrides=list(overrides), **given)[0]
    validate(f"{kind}_analysis", out["record"])
    return out


def check_left_alone(out, kind, prefix):
    """The batch is as before, and what is logged is what is written."""
    assert out["ends"] is False and out["batch_is_same"]
    assert all(out["metrics"][name] == value for name, value in out["record"]["metrics"].items())
    assert out["metrics"][f"{prefix}/failures"] == 0 and out["timing"][f"{kind}_analysis"] > 0


def test_an_analysis_logs_writes_and_leaves_the_batch_alone(world, dump_dir):
    out = analyse(world, dump_dir)
    check_left_alone(out, "gradient", "grad_analysis")
    assert out["vital"] == ["RayError"], "a lost worker ends the run"
    assert out["files"] == ["group_rv_table_step_1.csv", "step_1.json"]
    assert out["tables"] == [f"grad_norm/bucket_{number}/group_rv_table" for number in range(1, 7)]
    metrics, record = out["metrics"], out["record"]
    assert [bucket["name"] for bucket in record["buckets"]] == [*(f"bucket_{number}" for number in range(1, 7)), "all"]
    assert metrics["grad_norm/all/sample_count"] == 16
    assert metrics["grad_norm/bucket_1/sample_count"] == 4
    assert metrics["grad_norm/bucket_6/sample_count"] == 2
    assert metrics["actor/grad_norm/task"] == metrics["grad_norm/all/task"] > 0
    assert metrics["grad_analysis/zero_variance_share"] == pytest.approx(1 / 8)
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
    record = analyse(world, dump_dir, *rollout(**settings), rewards=rewards, per_group=per_group)["record"]
    *buckets, whole = record["buckets"]
    assert [bucket["num_rows"] for bucket in buckets] == counts
    assert whole["num_rows"] == len(rewards)
    assert sum(bucket["weight"]["task"] for bucket in buckets) == pytest.approx(1.0)
    assert whole["norm"]["task"]["own"] > 0


# ---- by quartile


def by_quartile(world, dump_dir, *overrides, **given):
    return analyse(world, dump_dir, *overrides, kind="quartile", rewards=[0.0] * 16, per_group=1, **given)


def test_an_analysis_by_quartile_does_so_too(world, dump_dir):
    out = by_quartile(world, dump_dir, SAMPLE + "10")
    check_left_alone(out, "quartile", "quartile_analysis")
    record, metrics = out["record"], out["metrics"]
    assert out["files"] == ["step_1.json"] and record["closure"] < 1e-5
    quartiles = record["quartiles"]
    assert sum(quartile["token_share"] for quartile in quartiles) == pytest.approx(1)
    assert sum(quartile["gradient_share"] for quartile in quartiles) == pytest.approx(1, rel=1e-4)
    assert len(record["tokens"]) == 10
    assert [quartile["sampled"] for quartile in quartiles] == [3, 3, 2, 2]
    for name in ("lowest", "highest"):
        assert -1 <= metrics[f"quartile_analysis/update_{name}/agreement"] <= 1


@pytest.mark.parametrize("kind", ["quantile", pytest.param("range", marks=pytest.mark.slow)])
def test_what_is_said_of_a_quartile_is_true_of_its_tokens(world, dump_dir, kind):
    out = by_quartile(world, dump_dir, SPLIT + kind, SAMPLE + "0")
    rows = zip(out["old_log_probs"], out["response_mask"], strict=True)
    tokens = sorted(
        math.exp(value) for values, mask in rows for value, inside in zip(values, mask, strict=True) if inside
    )
    if kind == "quantile":
        expected = [[pi for i, pi in enumerate(tokens) if 4 * i // len(tokens) == q] for q in range(4)]
    else:
        expected = [[pi for pi in tokens if q / 4 < pi <= (q + 1) / 4] for q in range(4)]
    for quartile, mine in zip(out["record"]["quartiles"], expected, strict=True):
        assert quartile["num_tokens"] == len(mine)
        if not mine:
            assert quartile["probability"] is None and quartile["one_minus_probability"] is None
            continue
        assert quartile["one_minus_probability"] == pytest.approx(sum(1 - pi for pi in mine) / len(mine), rel=1e-5)
        assert quartile["probability"]["max"] == pytest.approx(mine[-1], rel=1e-5)
    for update in out["record"]["updates"].values():
        for change, mine in zip(update["changes"]["quartiles"] if update else [], expected, strict=bool(update)):
            assert sum(change["counts"]) == len(mine) if mine else change is None


def test_a_batch_without_advantages_is_recorded_as_one_without_a_gradient(world, dump_dir):
    out = by_quartile(world, dump_dir, SAMPLE + "4", has_advantages=False)
    assert out["record"]["closure"] is None
    assert out["record"]["updates"]["lowest"] is None
    assert all(quartile["gradient_share"] is None for quartile in out["record"]["quartiles"])
    assert out["record"]["rank_correlation"]["log_prob_norm"] is not None
    assert out["record"]["rank_correlation"]["loss_norm"] is None


# ---- the step around it


def test_the_run_is_to_end_after_the_analysis_where_asked(world, dump_dir):
    out = analyse(world, dump_dir, "trainer.exit_after_gradient_analysis=True")
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


def test_the_separate_batch_walks_through_verls_loop_and_leaves_the_trainer_alone(single, dump_dir):
    out = single.run(RUN + "prepare_separate", dump_dir=dump_dir)[0]
    assert out["seen"] == {"step": 7, "n": 3, "logger": [], "validates": False, "epochs_left": 2}
    first, again, other = out["batches"]
    assert len(set(first)) == 4 and set(first) <= set(range(100, 200))
    assert first == again != other
    assert (out["n"], out["steps"], out["is_loader_same"]) == (1, 7, True)
    assert out["logger"]
