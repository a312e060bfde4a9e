# SPDX-License-Identifier: Apache-2.0
"""Markdown, JSON and CSV say the same as the page, and no token breaks out of them."""

import csv
import io
import json

import pytest

from gradloc.report.pages import exports
from gradloc.report.runs.run import read_run
from tests.report.builder import HOSTILE, make_culprit, make_event, make_metrics, write_run


@pytest.fixture
def run(tmp_path):
    culprits = [make_culprit(), make_culprit(5, token="=1+1", share="NaN")]
    events = [make_event(1, culprits), make_event(2, [])]
    return read_run(write_run(tmp_path, events, metrics=make_metrics()))


def test_json_is_json_and_round_trips(run):
    document = json.loads(exports.to_json(run, run.events))
    assert document["run"] == "tests / report"
    assert document["events"][0]["culprits"][1]["share"] == "NaN"
    assert document["events"][0]["verdict"].startswith("At step 1 the gradient norm was 748")


def test_csv_has_a_line_per_culprit_and_one_for_an_event_without(run):
    rows = list(csv.DictReader(io.StringIO(exports.to_csv(run, run.events))))
    assert [row["global_step"] for row in rows] == ["1", "1", "2"]
    assert json.loads(rows[0]["tokens"]) == " is"
    assert rows[2]["tokens"] == ""


def test_no_csv_cell_starts_a_formula(run):
    for row in csv.reader(io.StringIO(exports.to_csv(run, run.events))):
        for cell in row:
            is_number = cell.replace("-", "").replace(".", "").replace("e", "").isdigit()
            assert is_number or cell[:1] not in ("=", "+", "-", "@"), cell


def test_markdown_shows_the_verdict_the_culprits_and_the_command(run):
    text = exports.to_markdown(run, run.events)
    assert "At step 1 the gradient norm was 748" in text
    assert "`=1+1`" in text or "` =1+1 `" in text
    assert "python -m verl.gradloc.replay" in text


@pytest.mark.parametrize("token", [*HOSTILE, "`", "``` x", "a|b"])
def test_a_hostile_token_stays_in_its_markdown_cell(tmp_path, token):
    event = make_event(culprits=[make_culprit(token=token)])
    found = read_run(write_run(tmp_path, [event]))
    row = next(line for line in exports.to_markdown(found, found.events).splitlines() if "rank 1" in line)
    assert row.count("|") - row.count("\\|") == 8
    fence = row[2:].split(" ")[0]
    assert set(fence) == {"`"}
    assert f"{fence} |" in row


def test_markdown_text_is_literal():
    assert exports.escape("<img> *x* [a](b)") == r"\<img\> \*x\* \[a\]\(b\)"
