# SPDX-License-Identifier: Apache-2.0
"""No two statements about one event differ: page, token panel, heat map, Markdown, CSV, terminal, console, trackers.

What they say is in tests/data/golden/events.json, as facts; no test holds a sentence.
"""

import math
import re

import pytest

from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from gradloc.tell.lines import COLUMNS, table_rows
from gradloc.words.advice import ACTIONS, CHECKPOINT, VERLS, is_trl, lines_of, verl_of
from gradloc.words.next_step import Evidence, rule_for
from tests.report.builder import make_metrics, write_run
from tests.report.events import CASES, OF_RULES, event
from tests.report.golden import Told, found, golden, known

GOLDEN = known("events.json")
LINES = {verl: {action.line(verl) for action in ACTIONS.values()} for verl in VERLS}


@pytest.fixture(scope="module", params=CASES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def told(name, tmp_path_factory):
    """Everything that is said of one event."""
    return Told(event(name), tmp_path_factory.mktemp("event"))


def test_every_surface_says_the_golden_facts(name, told):
    assert golden(name, told) == GOLDEN[name], "where it is meant: python -m tests.report.golden"
    assert name not in OF_RULES or rule_for(Evidence(told.event)).seen == name


def test_the_norms_of_the_first_screen_are_those_of_the_verdict_and_of_an_issue(told):
    figures, said = ({*told.parts.get(part, "").split()} for part in ("figures", "said"))
    if told.event.culprits and math.isfinite(told.event.trigger.grad_norm):
        numbers = re.findall(r"(?<![\d.,])\d[\d.,e]*\d", re.search(r"Norm (.*?)\n", told.markdown)[1])
        assert figures <= said and {*numbers} <= figures


def test_shares_add_up_and_the_token_panel_says_the_same(told):
    event = told.event
    carried = re.findall(r"carr(?:y|ies) (-?[\d.]+)%", told.text)
    each = [float(share) for share in re.findall(r"<dt>share of the spike</dt><dd>(-?[\d.]+)%", told.body)]
    if carried and len(each) == len(event.culprits):
        assert sum(each) == pytest.approx(float(carried[0]), abs=0.06 * len(each))
    (sequence,) = told.payload["events"][event.event_id]["s"]
    part = sequence["parts"][0]
    is_trusted = event.shares is None or event.shares.is_trusted
    assert is_trusted or not {"share", "share_error"} & {*part["v"], *part["l"]}
    for culprit in event.culprits:
        shares, is_here = part["v"].get("share"), (culprit.rank, len(culprit.positions)) == (1, 1)
        if is_here and isinstance(shares, list) and isinstance(culprit.share, float):
            assert shares[culprit.positions[0] - part["a"]] == pytest.approx(culprit.share, rel=1e-3)


def test_a_share_that_is_not_trusted_is_nowhere_and_a_trusted_one_has_its_error(told):
    event = told.event
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table_rows([event])]
    for culprit, row, line in zip(event.culprits, rows, told.table, strict=False):
        is_shown = culprit.is_exact or event.shares is None or event.shares.is_trusted
        assert (row["share"] is not None, line["share"] != "") == (is_shown and culprit.share is not None,) * 2
        assert not is_shown or line["share_error"] == str(culprit.share_error or "")
    if event.shares is not None and not event.shares.is_trusted and not any(c.is_exact for c in event.culprits):
        surfaces = " ".join((told.text, told.markdown, told.terminal, told.console))
        assert not re.search(r"\d%", re.sub(r"healthy gradient to [\d.]+%", "", surfaces))


def test_what_was_done_is_not_advised_again(told):
    requested = told.event.action.requested
    assert f"action.mode={requested}" not in told.parts.get("do", "").split(" | ")[0].split(".gradloc.")[-1]


def test_the_cause_is_one(told):
    if told.event.culprits and not (told.event.cause and told.event.cause.reason):
        titles = re.findall(r"<h4>(.*?)</h4>\s*<p>", told.html)
        assert titles[0] in re.search(r'<p class="lede">(.*?)</p>', told.html)[1]


def test_every_line_to_copy_is_one_of_the_verl_that_ran_or_was_measured(told):
    trainer = told.event.run.trainer
    verl = verl_of(trainer)
    lines = LINES[verl] if verl else LINES["0.7"] | LINES["0.9"]
    if is_trl(trainer) or trainer == "loop":
        lines = {line for name in ACTIONS for line in lines_of(name, trainer).values()}
    lines |= {cured.line for cured in told.event.cures or ()}
    for line in found(r'data-copy="([^"]*)"', told.body):
        is_replay = line.startswith("python -m gradloc.replay ")
        assert is_replay or re.sub("(?<=resume_from_path=).*", CHECKPOINT, line) in lines, line


def test_nothing_is_empty_or_unfilled(told):
    for text in (told.text, told.markdown, told.terminal, told.console):
        assert not re.search(r"\bNone\b|\bnan\b|\{\w+\}|\w \.|\w\.\.(?!\.)", text)


def test_a_list_of_events_names_the_cause_of_each(tmp_path):
    documents = [event(name) | {"verdict": "An older version said otherwise."} for name in CASES]
    text = page.render(read_run(write_run(tmp_path, documents, metrics=make_metrics(30))))
    assert "otherwise" not in text
    for name, of in GOLDEN.items():
        assert "cause" not in of or f'"cause":"{of["cause"]}"' in text, name
