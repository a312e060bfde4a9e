# SPDX-License-Identifier: Apache-2.0
"""The trainer's side: the file, metrics and odd batches."""

import math

import pytest

from tests.world.events import validate

SPLIT = "trainer.quartile_analysis_split="
SAMPLE = "trainer.quartile_analysis_num_tokens="


def analyse(world, dump_dir, *overrides, num_rows=16, spoil=""):
    given = dict(rewards=[0.0] * num_rows, per_group=1, overrides=list(overrides), spoil=spoil)
    return world.run("tests.analysis.trainer.analyse", kind="quartile", dump_dir=dump_dir, **given)[0]


def test_an_analysis_logs_writes_and_leaves_the_batch_alone(world, dump_dir):
    out = analyse(world, dump_dir, SAMPLE + "10")
    record, metrics = out["record"], out["metrics"]
    validate("quartile_analysis", record)
    assert out["ends"] is False and out["batch_is_same"]
    assert out["files"] == ["step_1.json"]
    assert all(metrics[name] == value for name, value in record["metrics"].items())
    assert metrics["quartile_analysis/failures"] == 0
    assert out["timing"]["quartile_analysis"] > 0
    assert record["closure"] < 1e-5
    quartiles = record["quartiles"]
    assert sum(quartile["token_share"] for quartile in quartiles) == pytest.approx(1)
    assert sum(quartile["gradient_share"] for quartile in quartiles) == pytest.approx(1, rel=1e-4)
    assert len(record["tokens"]) == 10
    assert [quartile["sampled"] for quartile in quartiles] == [3, 3, 2, 2]
    for name in ("lowest", "highest"):
        assert -1 <= metrics[f"quartile_analysis/update_{name}/agreement"] <= 1


@pytest.mark.parametrize("kind", ["quantile", pytest.param("range", marks=pytest.mark.slow)])
def test_what_is_said_of_a_quartile_is_true_of_its_tokens(world, dump_dir, kind):
    out = analyse(world, dump_dir, SPLIT + kind, SAMPLE + "0")
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
    validate("quartile_analysis", out["record"])
    for update in out["record"]["updates"].values():
        for change, mine in zip(update["changes"]["quartiles"] if update else [], expected, strict=bool(update)):
            assert sum(change["counts"]) == len(mine) if mine else change is None


@pytest.mark.slow
def test_rows_that_do_not_divide_among_the_ranks_are_all_counted(world, dump_dir):
    out = analyse(world, dump_dir, SAMPLE + "3", num_rows=15)
    validate("quartile_analysis", out["record"])
    assert out["record"]["num_rows"] == 15
    assert out["record"]["whole"]["num_tokens"] == sum(map(sum, out["response_mask"]))
    assert out["record"]["closure"] < 1e-5


def test_a_batch_without_advantages_is_recorded_as_one_without_a_gradient(world, dump_dir):
    out = analyse(world, dump_dir, SAMPLE + "4", spoil="no advantages")
    validate("quartile_analysis", out["record"])
    assert out["record"]["closure"] is None
    assert out["record"]["updates"]["lowest"] is None
    assert all(quartile["gradient_share"] is None for quartile in out["record"]["quartiles"])
    assert out["record"]["rank_correlation"]["log_prob_norm"] is not None
    assert out["record"]["rank_correlation"]["loss_norm"] is None


def test_old_log_probs_that_are_not_finite_are_refused_and_counted(world, dump_dir):
    out = analyse(world, dump_dir, spoil="a log-prob that is NaN")
    assert out["metrics"]["quartile_analysis/failures"] == 1
    assert out["record"] is None
