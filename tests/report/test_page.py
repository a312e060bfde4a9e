# SPDX-License-Identifier: Apache-2.0
"""The page: one file, closed to the network, hostile text literal, small, always the same."""

import json
import re
from html.parser import HTMLParser

import pytest

from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report.builder import (
    HOSTILE,
    VISIBLE,
    make_culprit,
    make_event,
    make_metrics,
    make_sequence,
    write_run,
)

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Document(HTMLParser):
    """What a page holds: elements outside templates, their attributes, the text of tokens."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.tokens: list[str] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self._is_token = False
        self.feed(text)
        assert self._open == [], f"elements left open: {self._open}"

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "template" not in self._open:
            self.elements.append((tag, found))
            self._is_token = "data-p" in found
            if self._is_token:
                self.tokens.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        if "template" not in self._open:
            self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._is_token = False

    def handle_data(self, data):
        if self._is_token:
            self.tokens[-1] += data
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)


def render(folder) -> str:
    return page.render(read_run(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("plain"), [make_event()], metrics=make_metrics())
    return render(folder)


def test_the_page_shows_everything_of_an_event_in_the_order_promised(plain):
    in_order = [
        "At step 5 the gradient norm was",
        "The run&#39;s gradient norm",
        "The tokens",
        "Where it is",
        "Share of the spike per rank and micro-batch",
        "Gradient norm per layer",
        "Its path",
        "Why",
        "The advantage is extreme",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "Proof and next step",
        "Certificate: explained",
        "Action: observe",
        "python -m verl.gradloc.replay",
    ]
    text = plain.replace("run's", "run&#39;s")
    places = [text.index(words) for words in in_order]
    assert places == sorted(places)


def test_the_page_reaches_for_nothing(plain):
    document = Document(plain)
    for tag, attributes in document.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {name for name in attributes if name.startswith("on")}
        assert "style" not in attributes, tag
        assert "src" not in attributes, tag
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(plain):
    import base64
    import hashlib

    policy = next(a["content"] for t, a in Document(plain).elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", plain, re.S)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_hostile_tokens_stand_on_the_page_as_text(tmp_path):
    event = make_event(culprits=[make_culprit(token="".join(HOSTILE), prompt="<b>p</b>")])
    event["run"]["experiment"] = HOSTILE[0]
    event["verdict"] = HOSTILE[0] + HOSTILE[1]
    event["search"]["stop_reason"] = "{{ 7 * 7 }}" + HOSTILE[0]
    sequences = {event["event_id"]: [make_sequence(tokens=HOSTILE, prompt=HOSTILE[0])]}
    text = render(write_run(tmp_path, [event], sequences, make_metrics()))
    document = Document(text)
    assert document.tokens == VISIBLE
    assert not [tag for tag, _ in document.elements if tag == "img"]
    assert "\u202e" not in text
    assert "49" not in re.findall(r"found: (.*?)<", text)
    payload = json.loads(document.scripts[0])
    assert payload["events"][event["event_id"]]["s"][0]["parts"][0]["t"] == VISIBLE


def test_a_lone_surrogate_anywhere_does_not_keep_the_page_from_being_written(tmp_path):
    event = make_event(culprits=[make_culprit(token="\ud800")])
    event["run"]["experiment"] = "x\udfff"
    event["verdict"] = "\ud800"
    found = write_run(tmp_path, [event], {event["event_id"]: [make_sequence(tokens=["\ud800"])]})
    page.write(tmp_path / "report.html", render(found))
    assert "\ufffd" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_same_run_gives_the_same_bytes(tmp_path, plain):
    folder = write_run(tmp_path, [make_event()], metrics=make_metrics())
    first, second = render(folder), render(folder)
    assert first == second
    assert not re.search(r"20\d\d-\d\d-\d\d", first.replace(str(tmp_path), ""))


def test_ids_are_unique(tmp_path):
    events = [make_event(step) for step in range(1, 6)]
    document = Document(render(write_run(tmp_path, events, metrics=make_metrics())))
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_ten_events_of_long_sequences_stay_under_two_megabytes_and_20k_nodes(tmp_path):
    culprits = [make_culprit(3), make_culprit(900), make_culprit(3500)]
    events = [make_event(step, culprits) for step in range(1, 11)]
    sequences = {event["event_id"]: [make_sequence(4096)] * 4 for event in events}
    text = render(write_run(tmp_path, events, sequences, make_metrics()))
    assert len(text.encode()) < 2_000_000
    assert len(Document(text).elements) < 20_000


def test_many_events_are_listed_and_opened_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DETAILED", 3)
    events = [make_event(step) for step in range(1, 201)]
    text = render(write_run(tmp_path, events, metrics=make_metrics(200, tuple(range(1, 201)))))
    document = Document(text)
    assert len(document.elements) < 20_000
    assert text.count("<template data-event=") == 200
    assert text.count('class="legend"') == 3
    assert not [1 for tag, _ in document.elements if tag == "article"]


@pytest.mark.parametrize(
    "changes",
    [
        {"culprits": []},
        {"shares": None, "folder": None},
        {"layers": {}},
        {"layer_history": {"num_steps": 9, "excess": {"layer 0": 41.0, "head": "NaN"}}},
        {"culprits": [make_culprit(share=None, grad_norm="NaN", layers={})]},
        {"culprits": [make_culprit(tokens=None, text_before=None, text_after=None, prompt=None)]},
        {"culprits": [make_culprit(span="sequence", positions=list(range(8)))]},
        {"culprits": [make_culprit(cause={"label": "brand_new", "numbers": {}})]},
        {"shares": {"closure": 0.4, "is_trusted": False, "micro_batches": [[0.4]]}},
    ],
    ids=["bare", "unbundled", "layers", "history", "nan", "text", "span", "cause", "distrust"],
)
def test_every_kind_of_event_has_a_page(tmp_path, changes):
    Document(render(write_run(tmp_path, [make_event(**changes)], metrics=make_metrics())))


def test_events_that_are_not_finite_are_drawn(tmp_path):
    events = [make_event(step) for step in range(1, 4)]
    for event, norm in zip(events, ("NaN", "Infinity", 1e12), strict=True):
        event["trigger"]["grad_norm"] = norm
        event["trigger"]["threshold"] = None
    text = render(write_run(tmp_path, events, metrics=make_metrics()))
    assert text.count('href="#event-') >= 6


def test_a_record_with_almost_nothing_in_it_has_a_page(tmp_path):
    text = render(write_run(tmp_path, [{"event_id": "bare"}], metrics=make_metrics()))
    assert "carries no verdict sentence" in text


def test_metrics_alone_have_a_page(tmp_path):
    text = render(write_run(tmp_path, metrics=make_metrics()))
    assert "No spike was localized in this run." in text


def test_what_could_not_be_read_is_said_on_the_page(tmp_path):
    folder = write_run(tmp_path, [make_event()], metrics=make_metrics())
    (folder / "gradloc" / "events" / "step000005-epoch0-mini0" / "sequences.json").unlink()
    text = render(folder)
    assert "its token view is missing" in text
    assert "the answer" in text  # the culprit in its sentence, from the event itself
