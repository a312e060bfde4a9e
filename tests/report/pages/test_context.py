# SPDX-License-Identifier: Apache-2.0
"""An event says when and by what it was made, and how often its like came; an issue of it holds no text by itself."""

from gradloc import __version__
from gradloc.record import Event
from gradloc.record.reading import read
from gradloc.report.pages.eventview import EventView, context
from gradloc.report.pages.exports import issue
from gradloc.report.runs.run import read_run
from tests.report.builder import make_culprit, make_event, make_metrics, write_run
from tests.report.long_run import MADE_BY


def event(step: int, token: str = " is", **changes) -> dict:
    return {
        **make_event(step, [make_culprit(token=token, data_row=17)]),
        "run": MADE_BY,
        "time": "2026-08-12T03:04:05Z",
        **changes,
    }


def known(document: dict, *others: dict) -> dict[str, str]:
    events = [read(Event, each) for each in (document, *others)]
    return dict(context(events[0], events))


def test_everything_that_is_known_is_told():
    assert known(event(5)) == {
        "when": "12 Aug 2026, 03:04 UTC",
        "made by": f"verl 0.9.1, torch 2.9.1, gradloc {__version__}",
        "model": "Qwen/Qwen3-4B",
        "commit": "1f0c3a9be812",
        "config": "8c2d61e0aa47",
        "data": "arithmetic, row 17",
        "seen": "once, at step 5",
    }


def test_an_old_record_says_what_it_can():
    assert known(make_event(5)) == {"data": "arithmetic", "seen": "once, at step 5"}
    assert known({**make_event(5, []), "time": "yesterday"}) == {"when": "yesterday", "seen": "once, at step 5"}


def test_how_often_its_like_came_is_counted_by_token_and_cause():
    seen = known(event(5), event(9), event(30), event(40, token=" 7"))["seen"]
    assert seen == "this token 3 times, first at step 5, last at step 30; extreme advantage: 4 of 4 events"
    late = known(event(100_005), event(200_009))["seen"]
    assert late == "this token 2 times, first at step 100005, last at step 200009; extreme advantage: 2 of 2 events"
    other = {**event(50), "culprits": [make_culprit(cause={"label": "kl_term", "numbers": {}})]}
    assert known(other, event(5))["seen"] == "once, at step 50; KL term: 1 of 2 events"


def test_an_issue_has_the_numbers_and_its_text_is_apart(tmp_path):
    run = read_run(write_run(tmp_path, [event(5)], metrics=make_metrics()))
    made, text = issue(EventView(run.events[0], run))
    for words in (
        "### One token made the step\\-5 spike".replace("\\", ""),
        "Norm 748 (14.3 times the threshold), 0.77 (within 0.0007) without the culprits: explained",
        "- Made by: verl 0.9.1, torch 2.9.1, gradloc ",
        "| id 1003 | rank 1, micro-batch 2, row 0, position 3 | 75% |",
        "**What to do now:**",
        "python -m gradloc.replay",
    ):
        assert words in made, words
    assert "the answer" not in made and '" is"' not in made and "What is 20+40?" not in made
    assert "the answer⟦ is⟧ 60." in text
