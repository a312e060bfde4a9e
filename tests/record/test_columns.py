# SPDX-License-Identifier: Apache-2.0
"""The table of tokens: what is computed of it is right, and every column is in all that a reader is given."""

import csv
import io
import json
import math

import pytest
import torch

from gradloc.loop.writer import BUNDLE_KEYS
from gradloc.record.columns import OF_A_TOKEN, SHOWN, STORED, column, value
from gradloc.report.pages import exports, page
from gradloc.report.runs.run import read_run
from tests.report.builder import SCHEMAS, make_culprit, make_event, make_metrics, make_sequence, write_run
from tests.report.golden import payload


@pytest.mark.parametrize("has_used", [True, False])
def test_a_computed_column_is_the_difference_of_two_or_its_exponential(has_used):
    torch.manual_seed(0)
    log_prob, stored, used, rollout = -torch.rand(4, 50)
    columns = {"log_prob": log_prob, "old_log_prob": stored, "rollout_log_prob": rollout}
    columns |= {"old_log_prob_used": used} if has_used else {}
    lists = {name: tuple(values.tolist()) for name, values in columns.items()}
    old = used if has_used else stored
    for name, wanted in {"ratio": (log_prob - old).exp(), "gap": log_prob - rollout}.items():
        assert column(lists, name) == pytest.approx(wanted.tolist(), rel=1e-6)
        assert value({key: values[7] for key, values in lists.items()}, name) == column(lists, name)[7]
    assert column(lists, "ratio_to_rollout") == pytest.approx((stored - rollout).exp().tolist(), rel=1e-6)
    assert column({"log_prob": (1.0,)}, "ratio") is value({"log_prob": 1.0}, "ratio") is None


@pytest.mark.parametrize(("log_ratio", "ratio"), [(699.0, math.exp(699.0)), (700.0, math.inf), (math.inf, math.inf)])
def test_a_ratio_that_no_float_holds_is_infinite(log_ratio, ratio):
    assert value({"log_prob": log_ratio, "old_log_prob": 0.0}, "ratio") == ratio
    assert math.isnan(value({"log_prob": math.nan, "old_log_prob": 0.0}, "ratio"))


def test_every_column_is_in_the_record_its_schema_the_csv_the_page_and_the_bundle(tmp_path):
    numbers = {name: 0.25 + at for at, name in enumerate(STORED)}
    sequence = make_sequence(8, **{name: [number] * 8 for name, number in numbers.items()})
    known = {name: number for name, number in numbers.items() if name in OF_A_TOKEN}
    event = make_event(culprits=[make_culprit(values=known)])
    run = read_run(write_run(tmp_path, [event], {event["event_id"]: [sequence]}, make_metrics()))
    (row,) = csv.DictReader(io.StringIO(exports.to_csv(run, run.events)))
    (culprit,) = json.loads(exports.to_json(run, run.events))["events"][0]["culprits"]
    (shown,) = payload(page.render(run))["events"][event["event_id"]]["s"]
    assert {name: float(row[name]) for name in known} == culprit["values"] == known
    assert {*OF_A_TOKEN} <= {*row} and {*shown["parts"][0]["v"]} == {*SHOWN}
    for file, kind in (("event", "Culprit"), ("sequences", "Sequence")):
        defs = json.loads((SCHEMAS / f"{file}.v2.schema.json").read_text())["$defs"]
        assert {*defs[kind]["properties"]["values" if kind == "Culprit" else "columns"]["properties"]} == {*STORED}
    assert {column.tensor for column in STORED.values()} - {""} <= {*BUNDLE_KEYS}
