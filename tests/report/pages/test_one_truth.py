# SPDX-License-Identifier: Apache-2.0
"""No two statements about one event differ: page, token panel, heat map, Markdown, CSV, terminal, console, trackers."""

import csv
import html
import io
import json
import re
from contextlib import redirect_stdout

import pytest

from gradloc.record import Event
from gradloc.record.reading import read
from gradloc.report.live.follow import news
from gradloc.report.pages import exports, page, terminal
from gradloc.report.runs.run import read_run
from gradloc.tell.lines import COLUMNS, announcement, table_rows
from gradloc.words.advice import ACTIONS, CHECKPOINT, VERLS, is_trl, trl_settings, verl_of
from gradloc.words.verdict import verdict_sentences
from tests.report.builder import make_metrics, make_sequence, write_run
from tests.report.kinds import kinds

KINDS = kinds()
LINES = {verl: {action.line(verl) for action in ACTIONS.values()} for verl in VERLS}


@pytest.fixture(scope="module", params=KINDS)
def told(request, tmp_path_factory):
    """Everything that is said of one event."""
    return Told(KINDS[request.param], tmp_path_factory.mktemp("kind"))


class Told:
    """One event and all that is said of it."""

    def __init__(self, document: dict, folder):
        sequence = make_sequence(600)
        sequences = {document["event_id"]: [sequence]}
        step = document["step"]["global_step"]
        self.run = read_run(write_run(folder, [document], sequences, make_metrics(step + 10, (step,))))
        (self.event,) = self.run.events
        text = page.render(self.run)
        self.payload = json.loads(re.search(r'id="payload">(.*?)</script>', text, re.S)[1])
        body = text.partition("<main>")[2].partition("</main>")[0].replace("<wbr>", "")
        self.copied = [html.unescape(line) for line in re.findall(r'data-copy="([^"]*)"', body)]
        self.body = html.unescape(
            re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<svg.*?</svg>", " ", body, flags=re.S)))
        )
        self.html = html.unescape(body)
        self.markdown = exports.to_markdown(self.run, self.run.events).replace("\\", "")
        self.verdict, self.console = verdict_sentences(self.event), announcement(self.event)
        self.headline = self.verdict.partition(". ")[0].removesuffix(".")
        (self.news,) = news(self.run, set())
        with redirect_stdout(io.StringIO()) as printed:
            terminal.summary(self.run, self.run.events)
        self.terminal = " ".join(printed.getvalue().split())
        self.table = list(csv.DictReader(io.StringIO(exports.to_csv(self.run, self.run.events))))

    def card(self, title: str) -> str:
        """The text of a card of the first screen."""
        found = re.search(rf'<section class="card {title}.*?</section>', self.html, re.S)
        return re.sub(r"\s+", " ", re.sub(r"<svg.*?</svg>|<[^>]*>", " ", found[0])) if found else ""

    @property
    def everywhere(self) -> list[str]:
        return [self.body, self.markdown, self.verdict, self.console, self.terminal]


def test_there_are_sixty_kinds():
    assert len(KINDS) >= 60


def test_all_begin_with_one_sentence(told):
    (h1,) = re.findall(r'<h1 class="headline">(.*?)</h1>', told.html)
    assert h1 == told.headline
    assert told.console.startswith(f"{h1}: ") and f"### {h1}" in told.markdown
    assert told.news.startswith(f"{h1}: ")
    assert " ".join(told.verdict.split()) in told.terminal


def test_there_is_one_norm_and_one_threshold(told):
    said = {
        found
        for text in told.everywhere
        for found in re.findall(r"(?:[Nn]orm was|Norm|, norm) ([\d,.e]+\d|NaN|∞)(?= |,|;)", text)
    }
    assert len(said) <= 1, said
    thresholds = {
        found for text in told.everywhere for found in re.findall(r"(?:threshold of|, threshold) ([\d,.]+\d)", text)
    }
    assert len(thresholds) <= 1, thresholds


def test_there_is_one_norm_without_the_culprits(told):
    if not told.event.culprits:
        return
    number = r"((?:at most )?[\d,.]+\d|–|NaN)"
    said = set(re.findall(rf"; {number}(?: \(within [\d.e-]+\))? without", told.verdict))
    said |= set(re.findall(rf"-> {number} without", told.console))
    said |= set(re.findall(rf"<dd>{number}</dd><dt>without", told.html))
    said |= set(re.findall(rf"with (?:it|them), {number}", told.body))
    said |= set(re.findall(rf"\), {number}(?: \(within [\d.e-]+\))? without the culprits", told.markdown))
    said |= set(re.findall(rf"→ {number}$", told.news))
    assert len(said) == 1, said


def test_shares_add_up_and_the_token_panel_says_the_same(told):
    event = told.event
    carried = {found for text in told.everywhere for found in re.findall(r"carr(?:y|ies) (-?[\d.]+)%", text)}
    assert len(carried) <= 1, carried
    each = [float(found) for found in re.findall(r"<dt>share of the spike</dt><dd>(-?[\d.]+)%", told.html)]
    if carried and len(each) == len(event.culprits):
        assert sum(each) == pytest.approx(float(*carried), abs=0.06 * len(each))
    if carried and float(*carried) > 105:
        assert "the other tokens pull the other way" in told.body
    (sequence,) = told.payload["events"][event.event_id]["s"]
    part = sequence["parts"][0]
    for culprit in event.culprits:
        shares = part["v"].get("share")
        is_here = (culprit.rank, len(culprit.positions)) == (1, 1)
        if is_here and isinstance(shares, list) and isinstance(culprit.share, float):
            assert shares[culprit.positions[0] - part["a"]] == pytest.approx(culprit.share, rel=1e-3)


def test_a_share_that_is_not_trusted_is_nowhere(told):
    event = told.event
    if event.shares is None or event.shares.is_trusted:
        return
    (sequence,) = told.payload["events"][event.event_id]["s"]
    assert not any("share" in part["v"] or "share" in part["l"] for part in sequence["parts"])
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table_rows([event])]
    for culprit, row, line in zip(event.culprits, rows, told.table, strict=True):
        assert (row["share"] is not None) == (line["share"] != "") == culprit.is_exact
    if not any(culprit.is_exact for culprit in event.culprits):
        shown = re.sub(r"[\d.]+% of its usual size", "", " ".join(told.everywhere))
        assert not re.search(r"\d%", shown)
    assert "add up" in told.body and "add up" in told.markdown


def test_a_share_that_was_read_off_has_its_standard_error_everywhere(told):
    (first, *more), shares = told.event.culprits or [None], told.event.shares
    if more or first is None or first.is_exact or shares is None or not shares.is_trusted:
        return
    share = "75% +- 1%"
    assert f"<dt>share of the spike</dt><dd>{share}</dd>" in told.html and f"| {share} |" in told.markdown
    assert told.terminal.count(share) == 3, "of the verdict, the event, its culprit"
    assert (told.table[0]["share"], told.table[0]["share_error"]) == ("0.75", "0.01")


def test_headline_badge_and_certificate_agree(told):
    event, verdict = told.event, told.event.certificate.verdict
    assert f'class="badge {verdict}"' in told.html
    is_finite = event.trigger.kind != "non_finite" and event.trigger.grad_norm == event.trigger.grad_norm
    if not event.culprits or not is_finite or (event.cause and event.cause.reason):
        return
    words = {"explained": " made ", "undecided": " may have made ", "not_explained": " made part of "}
    assert [words[verdict] in told.headline, "part of" in told.headline] == [True, verdict == "not_explained"]
    assert ("the spike is explained" in told.verdict) == (verdict == "explained")
    assert ("explained: without" in told.body) or verdict != "explained"


def test_what_was_done_is_said_once_and_not_advised_again(told):
    taken, hurt = told.event.action.taken, told.card("hurt")
    did = {"mask": "took the step without", "skip": "took no step", "abort": "The run was stopped"}
    for mode, words in did.items():
        assert (words in hurt) == (mode == taken), mode
    assert f"Action: {taken}" in told.body and f"Action: {taken}" in told.markdown and f"taken: {taken}" in told.console
    requested = told.event.action.requested
    assert f"action.mode={requested} " not in told.card("todo")


def test_whether_it_hurt_fits_what_came_after(told):
    hurt = told.card("hurt")
    answer = re.search(r"Did it hurt\? (Yes|No|Not yet known)", hurt)[1]
    assert (answer == "Yes") == bool(re.search(r"(rose|fell) from|no later step", hurt))
    assert f"Did it hurt? {answer}." in told.markdown
    if "The step was not taken" in hurt:
        assert re.search(r"took no step|was stopped|skipped the step", hurt)


def test_the_cause_is_one(told):
    said = told.table[0]["cause"].replace("_", " ")
    if said and told.event.culprits and not (told.event.cause and told.event.cause.reason):
        titles = re.findall(r"<h4>(.*?)</h4>\s*<p>", told.html)
        lede = re.search(r'<p class="lede">(.*?)</p>', told.html)[1]
        assert titles[0] in lede and titles[0] in told.verdict


def test_every_line_to_copy_is_one_of_the_verl_that_ran(told):
    verl = verl_of(told.event.run.trainer)
    known = LINES[verl] if verl else LINES["0.7"] | LINES["0.9"]
    if is_trl(told.event.run.trainer):
        known = {trl_settings(line) for line in known}
    for line in told.copied:
        if line.startswith("python -m"):
            assert line.startswith("python -m gradloc.replay ")
        else:
            assert re.sub("(?<=resume_from_path=).*", CHECKPOINT, line) in known, line


def test_evidence_is_the_record_s_and_nothing_is_empty(told):
    todo = told.card("todo")
    if found := re.search(r"Its reward (?:is|of) (-?[\d,.]+\d|\d)", todo):
        assert float(found[1]) == told.event.culprits[0].reward
        is_odd = abs(told.event.culprits[0].reward) > 10
        assert ("Fix the reward function" in todo) == is_odd
    for text in told.everywhere:
        assert not re.search(r"\bNone\b|\bnan\b|\{\w+\}|  \.|\.\.", text), text


def test_a_stored_verdict_in_older_words_is_not_shown():
    document = KINDS["clipped"] | {"verdict": "At step 40 an older version said otherwise."}
    assert "otherwise" not in verdict_sentences(read(Event, document))
