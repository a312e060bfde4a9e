# SPDX-License-Identifier: Apache-2.0
"""The page: one file, closed to the network, hostile text literal, small, always the same."""

import base64
import hashlib
import html
import json
import re
import zlib
from pathlib import Path

import pytest

from gradloc.report import output
from gradloc.report.cli import main
from gradloc.report.pages import page
from gradloc.report.runs.run import read_run
from tests.report.builder import (
    HOSTILE,
    REPO,
    UNTRUSTED,
    VISIBLE,
    make_culprit,
    make_event,
    make_metrics,
    make_sequence,
    write_run,
)
from tests.report.golden import Html, found, payload

ALLOWED = set(
    "article p span b code details summary h2 h3 h4 small div dl dt dd mark section button fieldset legend label "
    "input i aside table thead tbody tr th td ul li figure figcaption svg rect text title path caption wbr "
    "polyline circle".split()
)
"""Elements that an event's article is made of."""


def render(folder) -> str:
    return page.render(read_run(folder))


def rendered(folder, *events: dict, sequence: dict | None = None) -> str:
    """The page of a run of these events, each with this sequence."""
    sequences = {event["event_id"]: [sequence or make_sequence()] for event in events}
    return render(write_run(folder, [*events], sequences, make_metrics()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return rendered(tmp_path_factory.mktemp("plain"), make_event())


def test_rows_prompts_and_data_sources_have_a_table_of_what_they_carry(plain, tmp_path):
    def part(name, share, rows):
        return {"name": name, "share": share, "share_error": 0.01, "num_rows": rows, "num_tokens": 7 * rows}

    shares = {"rows": [part("6", 0.75, 1), part("4", -0.1, 1)], "sources": [part("<b>sums", 0.65, 2)]}
    text = rendered(tmp_path, make_event(shares=shares))
    cells = [re.findall(r"<td.*?>(.*?)</td>", line) for line in re.findall(r"<tr>.*?</tr>", text)]
    assert ["6", "75% +- 1%", "1", "7"] in cells and ["4", "-10% +- 1%", "1", "7"] in cells
    assert ["&lt;b&gt;sums", "65% +- 1%", "2", "14"] in cells
    assert ">data source</th>" in text and ">prompt</th>" not in text and ">data source</th>" not in plain


def test_the_page_shows_everything_of_an_event_in_the_order_promised(plain):
    body = plain.partition("<main>")[2]
    parts = ['"headline"', '"lede"', '"text passage"', '"figures"', '"card hurt"', '"card todo"', '"context"']
    parts += [">The run</h2>", ">The tokens</h3>", ">Why</h3>", ">Where it is</h3>", ">Gradient norm by layer<"]
    parts += [">The search&#39;s path, ", ">Proof and replay</h3>"]
    places = [body.index(part) for part in parts]
    assert places == sorted(places)
    assert "buckets-title" not in body, "a run without analyses has no such section"


def test_events_of_several_kinds_are_counted_by_fault_and_cause_with_a_link_to_the_worst(tmp_path):
    other = make_culprit(cause={"label": "kl_term", "numbers": {}})
    events = [make_event(step, trigger={"grad_norm": 100.0 + step}) for step in (1, 2, 9)] + [make_event(5, [other])]
    text = rendered(tmp_path, *events)
    cells = [re.findall(r"<td>(?:<a [^>]*>)?(.*?)(?:</a>)?</td>", line) for line in re.findall(r"<tr>.*?</tr>", text)]
    assert ["extreme advantage", "3", "9", "step 9"] in cells and ["KL term", "1", "5", "step 5"] in cells
    assert 'href="#event-step000009-epoch0-mini0"' in text


def test_shares_that_do_not_add_up_are_neither_shown_nor_shaded(tmp_path):
    sequence = make_sequence(600, share_error=[0.001] * 600)
    text = rendered(tmp_path, make_event(culprits=[make_culprit(is_exact=False)], shares=UNTRUSTED), sequence=sequence)
    body = text.partition("<main>")[2].partition("</main>")[0]
    assert 'value="share"' not in body and 'value="coefficient" checked' in body
    assert "of the spike</button>" not in body and not re.search("189.5%|75%", body)
    exact = rendered(tmp_path, make_event(shares=UNTRUSTED))
    assert "rank 1, micro-batch 2: 75%" in exact and "189.5%" not in exact, "what a backward measured is drawn"


def test_a_fold_tells_its_share_with_its_standard_error(tmp_path, plain):
    sequence = make_sequence(600, share=[0.001] * 600, share_error=[0.0003] * 600)
    text = rendered(tmp_path, make_event(), sequence=sequence)
    assert "⋯ 536 tokens, 53.6% +- 0.69% of the spike</button>" in text  # 0.0003 sqrt(536)
    assert "+-" not in plain.partition("<main>")[2]


def test_the_page_reaches_for_nothing_and_allows_its_own_script_and_style_alone(plain):
    elements = Html(plain).elements
    for tag, attributes in elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src")}, tag
        assert all(attributes.get(name, "#").startswith("#") for name in ("href", "xlink:href"))
    policy = next(a["content"] for t, a in elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", plain, re.S)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" in policy


def test_hostile_tokens_stand_on_the_page_as_text(tmp_path):
    culprit = make_culprit(token="".join(HOSTILE), prompt="<b>p</b>")
    said = {"run": {"experiment": HOSTILE[0]}, "verdict": HOSTILE[0] + HOSTILE[1]}
    event = make_event(culprits=[culprit], search={"stop_reason": "{{ 7 * 7 }}" + HOSTILE[0]}, **said)
    text = rendered(tmp_path, event, sequence=make_sequence(tokens=HOSTILE, prompt=HOSTILE[0]))
    document = Html(text)
    assert document.tokens == VISIBLE == payload(text)["events"][event["event_id"]]["s"][0]["parts"][0]["t"]
    assert not [tag for tag, _ in document.elements if tag == "img"] and "\u202e" not in text
    assert "49" not in re.findall(r"found: (.*?)<", text)


def test_a_lone_surrogate_anywhere_does_not_keep_the_page_from_being_written(tmp_path):
    event = make_event(culprits=[make_culprit(token="\ud800")], verdict="\ud800", run={"experiment": "x\udfff"})
    output.write(tmp_path / "report.html", rendered(tmp_path, event, sequence=make_sequence(tokens=["\ud800"])))
    assert "\ufffd" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_example_is_the_present_page_of_the_demo(monkeypatch):
    monkeypatch.chdir(REPO)
    kept = Path("examples/report.html").read_text(encoding="utf-8")
    again = "gradloc examples/demo -o examples/report.html"
    assert render(Path("examples/demo")) == kept, f"it is another one: run {again}"


def test_ten_events_of_long_sequences_stay_under_two_megabytes_and_20k_nodes_with_ids_of_their_own(tmp_path):
    culprits = [make_culprit(3), make_culprit(900), make_culprit(3500)]
    events, sequences = [make_event(step, culprits) for step in range(1, 11)], [make_sequence(4096)] * 4
    text = render(write_run(tmp_path, events, {event["event_id"]: sequences for event in events}, make_metrics()))
    elements = Html(text).elements
    assert len(text.encode()) < 2_000_000 and len(elements) < 20_000
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def unpacked(text: str) -> dict[str, dict]:
    """What the browser makes of the events that a page carries compressed."""
    packed = re.findall(r'data-packed="([^"]*)">([^<]*)<', text)
    return {name: json.loads(zlib.decompress(base64.b64decode(of))) for name, of in packed}


def test_of_many_events_the_worst_are_carried_compressed_and_the_others_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "DETAILED", 3)
    events = [make_event(step) for step in range(1, 201)]
    for step in (7, 70, 170):
        events[step - 1]["trigger"]["grad_norm"] = 1e5
    text = rendered(tmp_path, *events)
    assert not [1 for tag, _ in Html(text).elements if tag == "article"]
    carried = unpacked(text)
    assert sorted(carried) == [f"step{step:06d}-epoch0-mini0" for step in (7, 70, 170)]
    assert len(Html(carried["step000070-epoch0-mini0"]["html"]).tokens) == 8
    assert carried["step000070-epoch0-mini0"]["s"][0]["c"] == [3]
    rows = payload(text)["rows"]
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 201)]
    assert payload(text)["show"] == f"gradloc report {tmp_path} --event ''", "what a row's name completes"


def test_the_page_that_the_command_writes_counts_the_kinds_of_events_unless_it_shows_some_alone(tmp_path):
    other = make_culprit(cause={"label": "low_probability", "numbers": {}})
    run, target = write_run(tmp_path / "run", [make_event(1), make_event(2, [other])]), tmp_path / "page.html"
    for words, is_counted in (([], True), (["--event", "step000001-epoch0-mini0"], False)):
        main([str(run), "-o", str(target), *words])
        assert ("Kinds of events" in target.read_text(encoding="utf-8")) == is_counted


def test_hostile_text_of_a_row_and_of_a_compressed_event_stays_text(tmp_path):
    events = [make_event(step, [make_culprit(token=HOSTILE[0])]) for step in range(1, 13)]
    text = rendered(tmp_path, *events, sequence=make_sequence(tokens=HOSTILE))
    assert not [tag for tag, _ in Html(text).elements if tag == "img"]
    for event in unpacked(text).values():
        document = Html(event["html"])
        assert document.tokens == VISIBLE and {tag for tag, _ in document.elements} <= ALLOWED
        names = {name for _, attributes in document.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name in ("style", "src")}


def test_events_that_are_not_finite_are_drawn(tmp_path):
    norms = ("NaN", "Infinity", 1e12)
    events = [make_event(at, trigger={"grad_norm": norm, "threshold": None}) for at, norm in enumerate(norms, 1)]
    drawn = payload(rendered(tmp_path, *events))
    assert [norm for _, norm, *_ in drawn["charts"]["run"]["marks"]] == [None, None, 1e12]
    assert [row["size"] for row in drawn["rows"]] == ["Infinity", "Infinity", 1e12]


def test_a_record_with_almost_nothing_in_it_has_a_page(tmp_path):
    assert "<h1" in render(write_run(tmp_path, [{"event_id": "bare"}], metrics=make_metrics()))


def test_a_page_of_norms_and_their_maxima_knows_one_median(tmp_path):
    run = read_run(write_run(tmp_path, metrics=make_metrics(300, ())))
    said = re.search(r"the run's median of ([\d.]+)\.", html.unescape(page.render(run)))
    assert ("median norm", said[1]) in page.facts(run)


def test_what_could_not_be_read_is_said_on_the_page(tmp_path):
    folder = write_run(tmp_path, [make_event()], metrics=make_metrics())
    (folder / "gradloc" / "events" / "step000005-epoch0-mini0" / "sequences.json").unlink()
    text = render(folder)
    assert found(r'<aside class="notes".*?<li>(.*?)</li>', text) and "the answer" in text, "the event's own text"
    assert "the answer" in render(write_run(tmp_path, [make_event(folder=None)], metrics=make_metrics()))


def test_the_culprits_picture_stands_in_the_page_and_a_stranger_does_not(tmp_path):
    event = make_event()
    name, stranger = "picture-0123456789ab.png", "../../secret.png"
    png = b"\x89PNG\r\n\x1a\n rest"
    culprits = make_sequence(pictures=[name, stranger], pictures_note="1 of 3 pictures are left out.")
    other = make_sequence(micro_batch_row=1, pictures=["picture-ba9876543210.png"])
    folder = write_run(tmp_path / "run", [event], {event["event_id"]: [culprits, other]})
    bundle = folder / "gradloc" / event["folder"]
    for place in (bundle / name, bundle / "picture-ba9876543210.png", folder / "gradloc" / "secret.png"):
        place.write_bytes(png)
    text = render(folder)
    shown = [attributes["src"] for tag, attributes in Html(text).elements if tag == "img"]
    assert shown == [f"data:image/png;base64,{base64.b64encode(png).decode()}"]
    assert "1 of 3 pictures are left out." in text and f"{stranger} of event {event['event_id']}" in text
