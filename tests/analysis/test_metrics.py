# SPDX-License-Identifier: Apache-2.0
"""The analysis record, its metrics and its files, from numbers small enough to check by hand."""

import csv
import json

import numpy as np
import pytest

from gradloc.analysis import buckets
from gradloc.analysis.reporter import log_group_table, write_record
from gradloc.record.analysis import Batch, Cost, GradientAnalysis, Loss, TrainingRun
from gradloc.rollout_filter.groups import group_rows
from tests.analysis.trainer import Wandb

GROUPS = group_rows(["a", "a", "b", "b", "c", "c"], [0, 1, 1, 1, 0, 4], [1, 2, 3, 4, 5, 5])
BUCKETS = {"bucket_1": [1], "bucket_2": [0, 2]}
RAW = {
    "terms": ["task", "kl"],
    "norms": [{"task": 2.0, "kl": 0.0}, {"task": 3.0, "kl": 4.0}, {"task": 5.0, "kl": 4.0}],
    "dots": [{"task_kl": 0.0}, {"task_kl": -6.0}, {"task_kl": 20.0}],
    "weights": [[0.25, 0.25], [0.75, 0.75]],
    "losses": [[0.5, 0.25], [1.5, 0.75]],
    "task_dots": [[4.0, 3.0], [3.0, 9.0]],
    "forwards": 8,
    "backwards": 6,
}
TOKENS = np.array([1, 2, 3, 4, 5, 5])


def record(**changes):
    return GradientAnalysis(
        run=TrainingRun(project="tests", experiment="analysis"),
        global_step=51,
        bucket_mode="quantile",
        num_buckets=2,
        loss=Loss(terms=("task", "kl"), loss_mode="vanilla", loss_agg_mode="token-mean", adv_estimator="grpo"),
        batch=Batch(
            source="training",
            num_groups=3,
            num_rows=6,
            num_tokens=20,
            zero_variance_share=GROUPS.zero_variance_share,
            filter=None,
        ),
        buckets=buckets.bucket_records(RAW, BUCKETS, GROUPS, TOKENS),
        task_cosines=buckets.bucket_cosines(RAW),
        groups=buckets.group_table(BUCKETS, GROUPS),
        cost=Cost(forwards=8, backwards=6, probe_seconds=0.1, seconds=0.2),
        **changes,
    )


def test_a_bucket_is_measured_both_as_a_part_and_as_if_it_were_the_batch():
    first, second, whole = record().buckets
    assert [bucket.name for bucket in (first, second, whole)] == ["bucket_1", "bucket_2", "all"]
    assert vars(first.norm["task"]) == {
        "own": 8.0,  # 2 at a quarter of the weight
        "part": 2.0,
        "per_row": 1.0,
        "per_token": pytest.approx(2 / 7),
    }
    assert second.norm["kl"].own == pytest.approx(4 / 0.75)
    assert whole.norm["task"].own == whole.norm["task"].part == 5.0
    assert whole.num_rows == 6 and whole.num_tokens == 20


def test_losses_of_buckets_are_their_own_means_and_weigh_together_to_the_batch_loss():
    first, second, whole = (bucket.loss for bucket in record().buckets)
    assert first == {"policy": 2.0, "kl": 1.0, "total": 3.0}
    assert whole == {"policy": 2.0, "kl": 1.0, "total": 3.0}
    assert 0.25 * first["total"] + 0.75 * second["total"] == pytest.approx(whole["total"])


def test_a_bucket_without_response_tokens_carries_nothing():
    weights, losses = [[0.0, 0.25], [1.0, 0.75]], [[0.0, 0.25], [2.0, 0.75]]
    norms = [{"task": 0.0, "kl": 0.0}, *RAW["norms"][1:]]
    numbers = {**RAW, "weights": weights, "losses": losses, "norms": norms}
    first, _, _ = buckets.bucket_records(numbers, BUCKETS, GROUPS, TOKENS)
    assert first.norm["task"].own == first.loss["policy"] == 0.0


def test_cosines_are_left_out_where_a_gradient_is_zero():
    first, second, whole = (bucket.cosine["task_kl"] for bucket in record().buckets)
    assert first is None
    assert second == pytest.approx(-0.5)
    assert whole == pytest.approx(1.0)
    assert record().task_cosines == ((1.0, 0.5), (0.5, 1.0))


def test_metrics_carry_the_guides_names():
    logged = buckets.analysis_metrics(record())
    for bucket in ("all", "bucket_1", "bucket_2"):
        for name in (
            "sample_count sample_pct reward_std_mean reward_std_min reward_std_max group_rv_count "
            "task kl per_sample/task per_sample/kl per_token/task per_token/kl "
            "loss/policy loss/kl loss/total"
        ).split():
            assert isinstance(logged[f"grad_norm/{bucket}/{name}"], float), name
    for name in ("loss/policy", "loss/kl", "loss/total", "grad_norm/task", "grad_norm/kl"):
        assert f"actor/{name}" in logged
    assert logged["actor/grad_norm/task"] == logged["grad_norm/all/task"] == 5.0
    assert logged["grad_norm/bucket_2/sample_pct"] == pytest.approx(4 / 6)
    assert logged["grad_cosine/task/bucket_1/bucket_2"] == 0.5
    assert logged["grad_analysis/zero_variance_share"] == pytest.approx(1 / 3)
    assert "grad_norm/bucket_1/cosine/task_kl" not in logged
    assert not any("entropy" in name for name in logged)


def test_an_analysis_is_written_as_json_and_its_groups_as_csv_and_replaced_after_a_resume(tmp_path):
    write_record(str(tmp_path), "gradient_analysis", record(metrics={"first": 1.0}))
    path = write_record(str(tmp_path), "gradient_analysis", record(metrics={"odd": float("nan")}))
    assert path == tmp_path / "gradient_analysis" / "step_51.json"
    assert json.loads(path.read_text())["metrics"] == {"odd": "NaN"} and len(list(path.parent.iterdir())) == 2
    with open(path.parent / "group_rv_table_step_51.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bucket"], row["group_id"], row["uid"]) for row in rows] == [
        ("bucket_1", "1", "b"),
        ("bucket_2", "0", "a"),
        ("bucket_2", "2", "c"),
    ]
    assert float(rows[2]["reward_std"]) == pytest.approx(8**0.5)


def test_the_group_table_goes_to_wandb_where_verl_logs_there():
    wandb = Wandb()
    log_group_table({"console": None, "file": object()}, record())
    assert wandb.logged == []
    log_group_table({"console": None, "wandb": wandb}, record())
    ((tables, step, commit),) = wandb.logged
    assert (step, commit) == (51, False)
    assert list(tables) == [f"grad_norm/bucket_{number}/group_rv_table" for number in (1, 2)]
    columns, rows = tables["grad_norm/bucket_2/group_rv_table"]
    assert columns == ["bucket", "group_id", "reward_std"]
    assert [row[:2] for row in rows] == [["bucket_2", 0], ["bucket_2", 2]]
