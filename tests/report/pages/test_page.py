# SPDX-License-Identifier: Apache-2.0
"""The page: one file, closed to the network, hostile text literal, small, always the same."""

import base64
import hashlib
import html
import json
import re
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradloc.report import output
from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report.builder import (
    HOSTILE,
    REPO,
    UNTRUSTED,
    UNTRUSTED_SAID,
    VISIBLE,
    make_culprit,
    make_event,
    make_metrics,
    make_sequence,
    write_run,
)
from tests.report.long_run import write_long_run

ALLOWED = set(
    "article p span b code details summary h2 h3 h4 small div dl dt dd mark section button fieldset legend label "
    "input i aside table thead tbody tr th td ul li figure figcaption svg rect text title path caption wbr "
    "polyline circle".split()
)
"""Elements that an event's article is made of."""
VOID = {"meta", "input", "br", "img", "link", "hr", "wbr"}


class Document(HTMLParser):
    """What a page holds: elements, their attributes, the text of tokens."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.tokens: list[str] = []
        self._open: list[str] = []
        self._is_token = False
        self.feed(text)
        assert self._open == [], f"elements left open: {self._open}"

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.elements.append((tag, found))
        self._is_token = "data-p" in found
        if self._is_token:
            self.tokens.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._is_token = False

    def handle_data(self, data):
        if self._is_token:
            self.tokens[-1] += data


def payload_of(text: str) -> dict:
    """What the page's script reads."""
    return json.loads(re.search(r'id="payload">(.*?)</script>', text, re.S)[1])


def render(folder) -> str:
    return page.render(read_run(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("plain"), [make_event()], metrics=make_metrics())
    return render(folder)


def test_the_page_shows_everything_of_an_event_in_the_order_promised(plain):
    in_order = [
        "One token made the step-5 spike",
        "It carries 75% of the gradient. The advantage is extreme: 14,578 times typical.",
        "the answer",
        "gradient norm",
        "14.3 times the threshold",
        "without it",
        "Did it hurt?",
        "The optimizer took the step with the spike in it.",
        "What to do now",
        "trainer.rollout_data_dir=rollouts",
        "Right if",
        "once, at step 5",
        "Copy as an issue",
        "The run",
        "The tokens",
        "Why",
        "The advantage is extreme",
        "14,578 times typical",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "Where it is",
        "Share of the spike by rank and micro-batch",
        "Gradient norm by layer",
        "Its path",
        "Proof and replay",
        "One token made the step-5 spike. It is the token",
        "Certificate: explained",
        "Action: observe",
        "python -m gradloc.replay",
        "python -m gradloc.replay",
    ]
    at = 0
    for words in in_order:
        at = plain.replace("<wbr>", "").find(words, at)
        assert at >= 0, words
    assert "Gradient by reward variance" not in plain, "a run without analyses has no such section"


def test_shares_that_do_not_add_up_are_neither_shown_nor_shaded(tmp_path):
    event = make_event(culprits=[make_culprit(is_exact=False)], shares=UNTRUSTED)
    sequence = make_sequence(600, share_error=[0.001] * 600)
    text = html.unescape(render(write_run(tmp_path, [event], {event["event_id"]: [sequence]})))
    body, payload = text.partition("<main>")[2].partition("</main>")[0], payload_of(text)
    assert body.count(UNTRUSTED_SAID) == 2, "beside the tokens, and where they are"
    assert 'value="share"' not in body and 'value="coefficient" checked' in body
    assert "of the spike</button>" not in body and "<dt>share of the spike</dt><dd>–</dd>" in body
    assert not re.search("Share of the spike by rank|189.5%|75%", body)
    for part in payload["events"][event["event_id"]]["s"][0]["parts"]:
        assert not {"share", "share_error"} & {*part["v"], *part["l"]}


def test_of_shares_that_do_not_add_up_those_that_a_backward_measured_are_drawn(tmp_path):
    text = html.unescape(render(write_run(tmp_path, [make_event(shares=UNTRUSTED)])))
    assert "Share of the spike by rank and micro-batch: the culprits', each measured by itself" in text
    assert "rank 1, micro-batch 2: 75%" in text and "189.5%" not in text


def test_shares_are_told_with_their_standard_errors_where_these_are_known(tmp_path, plain):
    shares = make_event()["shares"] | {"closure": 0.98, "closure_error": 0.05}
    event = make_event(culprits=[make_culprit(share_error=0.004)], shares=shares)
    sequence = make_sequence(600, share=[0.001] * 600, share_error=[0.0003] * 600)
    text = html.unescape(render(write_run(tmp_path, [event], {event["event_id"]: [sequence]})))
    assert "The measured shares add up to 0.98 +- 0.05." in text
    assert "<dt>share of the spike</dt><dd>75% +- 0.4%</dd>" in text
    assert re.search(r"⋯ \d+ tokens, [\d.]+% \+- [\d.]+% of the spike</button>", text)
    assert "The measured shares add up to 0.9998." in plain and "+-" not in plain.partition("<main>")[2]


@pytest.mark.parametrize(
    ("method", "difference", "said"),
    [
        ("subtract", 0.0341, "the culprits alone were 0.034 apart."),
        ("swap", 0.0, "the culprits' micro-batches were bit for bit alike."),
        ("recompute", 0.0341, "a micro-batch without the culprits were 0.034 apart."),
        ("none", 0.0, "the step were bit for bit alike."),
    ],
)
def test_how_far_replays_were_apart_is_said_with_what_was_replayed(tmp_path, method, difference, said):
    event = make_event()
    event["certificate"] |= {"method": method, "replay_difference": difference}
    assert f"Two replays of {said}" in html.unescape(render(write_run(tmp_path, [event])))


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
    policy = next(a["content"] for t, a in Document(plain).elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", plain, re.S)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
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
    payload = payload_of(text)
    assert payload["events"][event["event_id"]]["s"][0]["parts"][0]["t"] == VISIBLE


def test_a_lone_surrogate_anywhere_does_not_keep_the_page_from_being_written(tmp_path):
    event = make_event(culprits=[make_culprit(token="\ud800")])
    event["run"]["experiment"] = "x\udfff"
    event["verdict"] = "\ud800"
    found = write_run(tmp_path, [event], {event["event_id"]: [make_sequence(tokens=["\ud800"])]})
    output.write(tmp_path / "report.html", render(found))
    assert "\ufffd" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_example_is_the_present_page_of_the_demo(monkeypatch):
    monkeypatch.chdir(REPO)
    kept = Path("examples/report.html").read_text(encoding="utf-8")
    again = "gradloc-report examples/demo -o examples/report.html"
    assert render(Path("examples/demo")) == kept, f"it is another one: run {again}"


def test_ten_events_of_long_sequences_stay_under_two_megabytes_and_20k_nodes_with_ids_of_their_own(tmp_path):
    culprits = [make_culprit(3), make_culprit(900), make_culprit(3500)]
    events = [make_event(step, culprits) for step in range(1, 11)]
    sequences = {event["event_id"]: [make_sequence(4096)] * 4 for event in events}
    text = render(write_run(tmp_path, events, sequences, make_metrics()))
    elements = Document(text).elements
    assert len(text.encode()) < 2_000_000 and len(elements) < 20_000
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def unpacked(text: str) -> dict[str, dict]:
    """What the browser makes of the events that a page carries compressed."""
    found = re.findall(r'data-packed="([^"]*)">([^<]*)<', text)
    return {name: json.loads(zlib.decompress(base64.b64decode(packed))) for name, packed in found}


def test_of_many_events_the_worst_are_carried_compressed_and_the_others_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DETAILED", 3)
    events = [make_event(step) for step in range(1, 201)]
    events[1]["certificate"] |= {"norm_after": 1.38, "error_bound": 2.562}
    for step in (7, 70, 170):
        events[step - 1]["trigger"]["grad_norm"] = 1e5
    text = render(write_run(tmp_path, events, metrics=make_metrics(200, tuple(range(1, 201)))))
    assert not [1 for tag, _ in Document(text).elements if tag == "article"]
    carried = unpacked(text)
    assert sorted(carried) == [f"step{step:06d}-epoch0-mini0" for step in (7, 70, 170)]
    document = Document(carried["step000070-epoch0-mini0"]["html"])
    assert len(document.tokens) == 8
    assert carried["step000070-epoch0-mini0"]["s"][0]["c"] == [3]
    rows = payload_of(text)["rows"]
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 201)]
    assert [row["step"] for row in rows if "command" not in row] == ["7", "70", "170"]
    assert [row["without"] for row in rows[:2]] == ["0.77", "at most 3.95"], "as on the event's own page"
    assert rows[0]["command"] == f"gradloc-report show {tmp_path} --event step000001-epoch0-mini0"


def test_hostile_text_of_a_row_and_of_a_compressed_event_stays_text(tmp_path):
    events = [make_event(step, [make_culprit(token=HOSTILE[0])]) for step in range(1, 13)]
    sequences = {event["event_id"]: [make_sequence(tokens=HOSTILE)] for event in events}
    text = render(write_run(tmp_path, events, sequences, make_metrics()))
    assert not [tag for tag, _ in Document(text).elements if tag == "img"]
    for event in unpacked(text).values():
        document = Document(event["html"])
        assert document.tokens == VISIBLE
        assert {tag for tag, _ in document.elements} <= ALLOWED
        for _, attributes in document.elements:
            assert not {name for name in attributes if name.startswith("on") or name in ("style", "src")}


@pytest.mark.full
def test_two_thousand_events_take_few_seconds_and_megabytes(tmp_path):
    culprits = [make_culprit(3 + 5 * index, token=f" token{index}") for index in range(8)]
    folder = write_run(tmp_path, [make_event(step, culprits) for step in range(1, 2001)], metrics=make_metrics(2000))
    start = time.process_time()
    text = render(folder)
    assert time.process_time() - start < 20
    assert len(text.encode()) < 8_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"folder": None},
        {"layers": {}},
        {"layer_history": {"num_steps": 9, "excess": {"layer 0": 41.0, "head": "NaN"}}},
        {"culprits": [make_culprit(share=None, grad_norm="NaN", layers={})]},
        {"culprits": [make_culprit(cause={"label": "brand_new", "numbers": {}})]},
        {"shares": {"closure": 0.4, "is_trusted": False, "micro_batches": [[0.4]]}},
    ],
    ids=["unbundled", "layers", "history", "nan", "cause", "distrust"],
)
def test_other_kinds_of_events_have_a_page(tmp_path, changes):
    Document(render(write_run(tmp_path, [make_event(**changes)], metrics=make_metrics())))


def test_events_that_are_not_finite_are_drawn(tmp_path):
    events = [make_event(step) for step in range(1, 4)]
    for event, norm in zip(events, ("NaN", "Infinity", 1e12), strict=True):
        event["trigger"]["grad_norm"] = norm
        event["trigger"]["threshold"] = None
    found = payload_of(render(write_run(tmp_path, events, metrics=make_metrics())))
    assert [norm for _, norm, _ in found["charts"]["run"]["marks"]] == [None, None, 1e12]
    assert [row["size"] for row in found["rows"]] == ["Infinity", "Infinity", 1e12]


def test_a_record_with_almost_nothing_in_it_has_a_page(tmp_path):
    text = render(write_run(tmp_path, [{"event_id": "bare"}], metrics=make_metrics()))
    assert "Nothing was found that made the spike at step 0" in text


def test_a_page_of_norms_and_their_maxima_knows_one_median(tmp_path):
    run = read_run(write_long_run(tmp_path / "healthy", num_events=0))
    said = re.search(r"the run's median of ([\d.]+)\.", html.unescape(page.render(run)))
    assert ("median norm", said[1]) in page.facts(run)


def test_what_could_not_be_read_is_said_on_the_page(tmp_path):
    folder = write_run(tmp_path, [make_event()], metrics=make_metrics())
    (folder / "gradloc" / "events" / "step000005-epoch0-mini0" / "sequences.json").unlink()
    text = render(folder)
    assert "its token view is missing" in text
    assert "the answer" in text  # the culprit in its sentence, from the event itself


def test_the_culprits_picture_stands_in_the_page_and_a_stranger_does_not(tmp_path):
    (tmp_path / "run").mkdir()
    event = make_event()
    name, stranger = "picture-0123456789ab.png", "../../secret.png"
    png = b"\x89PNG\r\n\x1a\n rest"
    of_culprit = make_sequence(pictures=[name, stranger], pictures_note="1 of 3 pictures are left out.")
    other = make_sequence(micro_batch_row=1, pictures=["picture-ba9876543210.png"])
    folder = write_run(tmp_path / "run", [event], {event["event_id"]: [of_culprit, other]})
    bundle = folder / "gradloc" / event["folder"]
    for place in (bundle / name, bundle / "picture-ba9876543210.png", folder / "gradloc" / "secret.png"):
        place.write_bytes(png)
    text = page.render(read_run(folder))
    shown = [found for tag, found in Document(text).elements if tag == "img"]
    assert [picture["src"] for picture in shown] == [f"data:image/png;base64,{base64.b64encode(png).decode()}"]
    assert "1 of 3 pictures are left out." in text
    assert f"{stranger} of event {event['event_id']} cannot be read, so not all pictures are shown." in text


def test_a_critics_event_says_so_and_offers_no_replay(tmp_path):
    cause = {"label": "value_outlier", "numbers": {"error_over_typical": 5e4, "value": 0.25}}
    culprit = make_culprit(cause=cause, log_prob=None, value=0.25, old_value=0.2, value_target=1e4)
    event = make_event(culprits=[culprit], model="critic")
    text = page.render(read_run(write_run(tmp_path / "run", [event])))
    assert "The value is far from the return: the value is off by 50,000 times typical." in text
    assert "the step-5 spike of the critic" in text and ", the critic" in text
    assert "<dt>return</dt><dd>10,000 <b>50,000 times typical</b></dd>" in text
    assert "gradloc.replay" not in text
