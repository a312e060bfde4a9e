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
    assert document["events"][0]["verdict"].startswith("Two tokens made the step-1 spike.")


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


@pytest.mark.parametrize("token", [*HOSTILE, "`", "``` x", "a|b"])
def test_a_hostile_token_stays_in_its_block(tmp_path, token):
    event = make_event(culprits=[make_culprit(token=token, text_after="\nafter")])
    found = read_run(write_run(tmp_path, [event]))
    lines = exports.to_markdown(found, found.events).splitlines()
    row = next(line for line in lines if "rank 1" in line)
    assert row.count("|") - row.count("\\|") == 8
    start = next(at for at, line in enumerate(lines) if line.endswith("text") and set(line[:-4]) == {"`"})
    fence = lines[start][:-4]
    assert lines.index(fence, start + 1) == len(lines) - 1, "nothing in the text ends the block"


def test_markdown_text_is_literal():
    assert exports.escape("<img> *x* [a](b)") == r"\<img\> \*x\* \[a\]\(b\)"


@pytest.mark.parametrize(
    ("strategy", "line", "other"),
    [
        ("auto", "gradloc.search.max_steps=8", "bisect_budget_steps"),
        ("bisect", "bisect_budget_steps=512", "search.max_steps"),
    ],
)
def test_advice_is_of_the_search_that_was_made(tmp_path, strategy, line, other):
    certificate = make_event()["certificate"] | {"verdict": "undecided"}
    search = make_event()["search"] | {"strategy": strategy, "status": "budget_exhausted"}
    run = read_run(write_run(tmp_path, [make_event(certificate=certificate, search=search)]))
    text = exports.to_markdown(run, run.events)
    assert line in text and other not in text
