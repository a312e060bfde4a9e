# SPDX-License-Identifier: Apache-2.0
"""What is said of an event is said once: its facts are the golden ones, and every surface has all of them."""

import io
import re
from contextlib import redirect_stdout

import pytest

from gradloc.explain.advice import ACTIONS, CHECKPOINT, VERLS, is_trl, lines_of, verl_of
from gradloc.explain.next_step import Evidence, rule_for
from gradloc.explain.text import one_line
from gradloc.report.pages import page, terminal
from gradloc.report.pages.document import Facts, Fold, Heading, Lines, Table
from gradloc.report.pages.exports import escape, issue
from tests.report.events import CASES, OF_RULES, event
from tests.report.golden import Html, golden, known, told

GOLDEN = known("events.json")
LINES = {verl: {action.line(verl) for action in ACTIONS.values()} for verl in VERLS}


@pytest.fixture(scope="module", params=CASES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def made(name, tmp_path_factory):
    """An event's document."""
    return told(event(name), tmp_path_factory.mktemp("event"))[1]


def test_an_event_s_facts_are_the_golden_ones(name, made):
    assert golden(name, made) == GOLDEN[name], "where it is meant: python -m tests.report.golden"
    assert name not in OF_RULES or rule_for(Evidence(made.event)).seen == name
    assert not re.search(r"\bNone\b|\bnan\b|\{\w+\}|\w \.|\w\.\.(?!\.)", "\n".join(every_text(made))), "unfilled"


def test_every_line_to_copy_is_one_of_the_verl_that_ran_or_was_measured_and_is_not_done_already(made):
    trainer = made.event.run.trainer
    verl = verl_of(trainer)
    lines = LINES[verl] if verl else LINES["0.7"] | LINES["0.9"]
    if is_trl(trainer) or trainer == "loop":
        lines = {line for name in ACTIONS for line in lines_of(name, trainer).values()}
    lines |= {cured.line for cured in made.event.cures or ()}
    for section in made.sections:
        for line in (line for block in strings(section.blocks, Lines) for line in block.lines.values() if line):
            is_replay = line.startswith("python -m gradloc.replay ")
            assert is_replay or re.sub("(?<=resume_from_path=).*", CHECKPOINT, line) in lines, line
    for first in [*strings(made.section("todo").blocks, Lines)][:1]:
        line = next(iter(first.lines.values()))
        assert f"action.mode={made.event.action.requested}" not in line.split(".gradloc.")[-1]


def strings(blocks, kind) -> list:
    """The blocks of a kind, those in folds too."""
    found = [block for block in blocks if isinstance(block, kind)]
    return found + [inner for fold in blocks if isinstance(fold, Fold) for inner in strings(fold.blocks, kind)]


def every_text(made, with_folds: bool = True) -> list[str]:
    """All that a document says, piece by piece; tokens aside."""
    found = [made.headline, made.lede, made.named, *(text for figure in made.figures for text in figure)]
    blocks = [block for section in made.sections for block in section.blocks]
    while blocks:
        block = blocks.pop(0)
        if isinstance(block, str):
            found.append(block)
        elif isinstance(block, Table):
            found += [cell for row in (block.head, *block.rows) for cell in row if isinstance(cell, str)]
        elif isinstance(block, Facts):
            found += [text for pair in block.pairs for text in pair]
        elif isinstance(block, Heading):
            found.append(block.text)
        elif isinstance(block, Lines):
            found += [text for pair in block.lines.items() for text in pair]
        elif isinstance(block, Fold) and (with_folds or block.is_open):
            found += [block.summary] if with_folds else []
            blocks[:0] = block.blocks
    return [text for text in found if text]


@pytest.mark.parametrize("name", [*CASES][::12])
def test_page_markdown_and_terminal_have_all_that_the_document_says(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    run, made = told(event(name), tmp_path)
    shown = " ".join(Html(page.render(run)).text.split())
    plain = " ".join(issue(made)[0].split())
    with redirect_stdout(io.StringIO()) as printed:
        terminal.summary(run, run.events)
    for text in every_text(made):
        assert " ".join(one_line(text).split()) in shown, "page"
        assert " ".join(escape(text).split()) in plain or " ".join(text.split()) in plain, "Markdown"
    for text in every_text(made, with_folds=False):
        assert " ".join(one_line(text).split()) in " ".join(printed.getvalue().split()), "terminal"
