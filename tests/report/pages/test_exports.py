# SPDX-License-Identifier: Apache-2.0
"""No token breaks out of Markdown, JSON or CSV; an issue holds no text by itself, and how often its like came."""

import csv
import io
import json
from pathlib import Path

import pytest

from gradloc.record import Culprit, Event, Step
from gradloc.record.reading import read
from gradloc.report.pages import exports
from gradloc.report.pages.document import context, document
from gradloc.report.pages.exports import escape, issue, to_markdown
from gradloc.report.runs.events import Events
from gradloc.report.runs.run import RunFolder, read_run
from tests.report.builder import HOSTILE, make_culprit, make_event, make_metrics, write_run

MADE_BY = {"project": "math", "trainer": "verl 0.9.1", "model": "Qwen/Qwen3-4B", "commit": "1f0c3a9be812"}


def test_csv_has_a_line_per_culprit_and_one_for_an_event_without_and_no_cell_starts_a_formula(tmp_path):
    culprits = [make_culprit(), make_culprit(5, token="=1+1", share="NaN")]
    run = read_run(write_run(tmp_path, [make_event(1, culprits), make_event(2, [])]))
    rows = list(csv.DictReader(io.StringIO(exports.to_csv(run, run.events))))
    assert [row["global_step"] for row in rows] == ["1", "1", "2"]
    assert json.loads(rows[0]["tokens"]) == " is" and rows[2]["tokens"] == ""
    for cell in (cell for row in rows for cell in row.values()):
        is_number = cell.replace("-", "").replace(".", "").replace("e", "").isdigit()
        assert is_number or cell[:1] not in ("=", "+", "-", "@"), cell


@pytest.mark.parametrize("token", [*HOSTILE, "`", "``` x", "a|b"])
def test_a_hostile_token_stays_in_its_block(tmp_path, token):
    event = make_event(culprits=[make_culprit(token=token, text_after="\nafter")])
    found = read_run(write_run(tmp_path, [event]))
    lines = to_markdown(found, found.events).splitlines()
    row = next(line for line in lines if "rank 1" in line)
    assert row.count("|") - row.count("\\|") == 8
    start = next(at for at, line in enumerate(lines) if line.endswith("text") and set(line[:-4]) == {"`"})
    assert lines.index(lines[start][:-4], start + 1) == len(lines) - 1, "nothing in the text ends the block"


def test_markdown_text_is_literal():
    assert escape("<img> *x* [a](b)") == r"\<img\> \*x\* \[a\]\(b\)"


@pytest.mark.parametrize(
    ("strategy", "line"), [("auto", "gradloc.search.max_steps=8"), ("bisect", "bisect_budget_steps=512")]
)
def test_advice_is_of_the_search_that_was_made(tmp_path, strategy, line):
    search = {"strategy": strategy, "status": "budget_exhausted"}
    run = read_run(write_run(tmp_path, [make_event(certificate={"verdict": "undecided"}, search=search)]))
    text = to_markdown(run, run.events)
    assert line in text and ("max_steps" in text) == (strategy == "auto")


def event(step: int, token: str = " is", cause: str = "extreme_advantage") -> dict:
    culprit = make_culprit(token=token, cause={"label": cause, "numbers": {}})
    return make_event(step, [culprit], run=MADE_BY, time="2026-08-12T03:04:05Z")


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ([5], "once, at step 5"),
        ([5, 9, 30], "this token 3 times, first at step 5, last at step 30; extreme advantage: 4 of 5 events"),
        (
            [100_005, 200_009],
            "this token 2 times, first at step 100005, last at step 200009; extreme advantage: 3 of 4",
        ),
    ],
)
def test_how_often_its_like_came_is_counted_by_token_and_cause(steps, seen):
    others = [event(40, token=" 7"), event(50, cause="kl_term")] if len(steps) > 1 else []
    events = [read(Event, document) for document in [*map(event, steps), *others]]
    known = dict(context(events[0], RunFolder(Path(), events=Events(events))))
    assert known["seen"].startswith(seen) and known["commit"] == MADE_BY["commit"]


@pytest.mark.parametrize(
    ("versions", "context_says", "fact"),
    [
        ((3, 4), "by the weights of steps 3 to 4, 1 update behind", "steps 3 to 4"),
        ((2, 2), "by the weights of step 2, 3 updates behind", "step 2"),
        ((5, 5), "by the weights of step 5", "step 5"),
        (None, None, None),
    ],
)
def test_the_page_says_which_weights_sampled_the_culprit_and_how_far_they_lag(versions, context_says, fact):
    event = Event(step=Step(global_step=6), culprits=(Culprit(positions=(1,), versions=versions),))
    made = document(event, RunFolder(Path(), events=Events([event])))
    assert dict(context(event, RunFolder(Path()))).get("sampled") == context_says
    assert (f"sampled by the weights of: {fact}" in issue(made)[0]) == (fact is not None)


def test_an_issue_has_the_numbers_and_its_text_is_apart(tmp_path):
    run = read_run(write_run(tmp_path, [event(5)], metrics=make_metrics()))
    made, text = issue(document(run.events[0], run))
    assert "| id 1003 | rank 1, micro-batch 2, row 0, position 3 | 75% |" in made and "python -m gradloc.replay" in made
    assert "the answer" not in made and '" is"' not in made and "What is 20+40?" not in made
    assert "the answer⟦ is⟧ 60." in text
