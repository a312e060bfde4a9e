# SPDX-License-Identifier: Apache-2.0
"""Whatever state a run's folder is in: one clear sentence, and what can be shown is shown."""

import json
import math
from dataclasses import replace

import pytest

from gradloc.record import Event, Fault
from gradloc.record.reading import read
from gradloc.report.errors import ReportError
from gradloc.report.logs.recording import MEAN
from gradloc.report.runs import events as reader
from gradloc.report.runs.events import read_sequences, row_of
from gradloc.report.runs.run import read_run
from tests.report.builder import make_culprit, make_event, make_metrics, write_run
from tests.report.logs.made import console


def steps(run):
    return [event.step.global_step for event in run.events]


@pytest.mark.parametrize("inside", ["", "gradloc", "gradloc/events.jsonl"])
def test_a_run_can_be_named_by_its_folder_its_events_folder_or_its_file(tmp_path, inside):
    run = read_run(write_run(tmp_path / "run", [make_event()], metrics=make_metrics()) / inside)
    assert (len(run.events), len(run.metrics.steps), run.notes) == (1, 20, [])
    assert run.name == "tests / report" and run.events[0].culprits[0].tokens == (" is",)


def test_numbers_that_json_cannot_spell_become_floats(tmp_path):
    culprit = make_culprit(advantage="NaN", grad_norm="Infinity")
    event = make_event(culprits=[culprit], trigger={"grad_norm": "-Infinity"})
    found = read_run(write_run(tmp_path, [event])).events[0]
    assert math.isnan(found.culprits[0].at("advantage"))
    assert (found.culprits[0].grad_norm, found.trigger.grad_norm) == (math.inf, -math.inf)


@pytest.mark.parametrize("text", ["NaN", "null", "1", "true"])
def test_a_token_that_looks_like_a_number_stays_text(tmp_path, text):
    found = read_run(write_run(tmp_path, [make_event(culprits=[make_culprit(token=text)])]))
    assert found.events[0].culprits[0].tokens == (text,)


LINE = json.dumps(make_event(2))
FUTURE = json.dumps(make_event(2, schema_version=7, new_field={"of": "the future"}))
UNREADABLE = json.dumps(make_event(2, schema_version=7) | {"culprits": {"not": "a list"}})


@pytest.mark.parametrize(
    ("line", "is_last", "note"),
    [
        (LINE[:-100], True, "The last line of events.jsonl (line 2) is cut off and was left out."),
        (LINE[:50], False, "Line 2 of events.jsonl is not JSON and was left out."),
        ("{}", False, "Line 2 of events.jsonl is no event record and was left out."),
        ("[]", False, "Line 2 of events.jsonl is no event record and was left out."),
        ('{"loss": 1}', False, "Line 2 of events.jsonl is no event record and was left out."),
        (
            FUTURE,
            False,
            "is of schema version 7, and this reader knows versions 1 and 2: it is shown as far as",
        ),
        (UNREADABLE, False, "is of schema version 7 (known: 1, 2) and cannot be read (culprits must be a list"),
    ],
    ids=["cut", "not JSON", "empty", "list", "other", "future", "unreadable"],
)
def test_a_broken_line_costs_only_itself_and_has_a_note(tmp_path, line, is_last, note):
    folder = write_run(tmp_path, [make_event(1), make_event(3)], metrics=make_metrics())
    path = folder / "gradloc" / "events.jsonl"
    first, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}" if is_last else f"{first}\n{line}\n{third}\n")
    run = read_run(folder)
    assert steps(run) == [1, *([2] if line == FUTURE else []), *([] if is_last else [3])]
    assert note in run.notes[0]


def test_a_line_beyond_the_limit_costs_only_itself(tmp_path, monkeypatch):
    lines = [
        json.dumps(make_event(1)),
        json.dumps(make_event(2) | {"verdict": "x" * 90_000}),
        json.dumps(make_event(3)),
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("gradloc.report.runs.events.DOCUMENT", 40_000)
    run = read_run(tmp_path)
    assert steps(run) == [1, 3] and run.notes[0] == "Line 2 of events.jsonl was left out: it is larger than 0.04 MB."


def test_beyond_the_first_events_only_rows_are_read_and_a_broken_field_costs_the_details(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "KEPT", 1)
    events = [make_event(at) | {"shares": {"closure": closure}} for at, closure in enumerate((1.0, 1.0, []))]
    run = read_run(write_run(tmp_path, events))
    assert [row_of(event) for event in run.events] == run.events.rows and not run.notes[1:]
    assert [event.shares and event.shares.closure for event in run.events] == [1.0, 1.0, None]
    assert run.events[2].culprits[0].tokens == (" is",)


def test_two_events_of_one_name_stay_apart(tmp_path):
    run = read_run(write_run(tmp_path, [make_event(1), make_event(1)], metrics=make_metrics()))
    assert len({event.event_id for event in run.events}) == 2


@pytest.fixture
def three(tmp_path):
    """A run of three events, each with the meta.json that the trainer writes."""
    events = [make_event(step) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "three", events, metrics=make_metrics())
    for event in events:
        meta = {"schema_version": 1, "actor": {"grad_clip": 1.0}, "event": event}
        (folder / "gradloc" / event["folder"] / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("torn", ["cut", "empty", "gone"])
def test_events_that_a_torn_events_file_lost_are_read_from_their_folders(three, torn):
    path = three / "gradloc" / "events.jsonl"
    if torn == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if torn == "cut" else 0])
    run = read_run(three)
    assert steps(run) == [1, 2, 3] and run.events[2].culprits[0].text == " is"
    assert any("that events.jsonl does not list: read from their folder" in note for note in run.notes)
    assert read_sequences(run.events_root, run.events[2])[0]


def test_an_event_folder_without_a_whole_meta_is_named(three):
    torn = three / "gradloc" / "events" / "step000004-epoch0-mini0"
    torn.mkdir()
    (torn / "meta.json").write_text('{"event": {"event_id"')
    run = read_run(three)
    assert len(run.events) == 3
    assert run.notes == ["1 event folder without a whole meta.json, and not in events.jsonl: step000004-epoch0-mini0."]


def test_a_folder_of_one_event_is_that_event(three):
    run = read_run(three / "gradloc" / "events" / "step000002-epoch0-mini0")
    assert steps(run) == [2] and run.metrics


@pytest.mark.parametrize("place", ["run/other.log", "run/gradloc/other.log", "elsewhere/other.log"])
def test_an_event_is_not_joined_to_a_log_of_another_run(tmp_path, place):
    write_run(tmp_path / "run", [make_event()])
    log = tmp_path / place
    log.parent.mkdir(exist_ok=True)
    log.write_text(console([0.5] * 40) + "\n")
    run = read_run(tmp_path)
    assert not run.metrics and any("1 log of the folder left out as another run's" in note for note in run.notes)
    log.write_text(console([0.5] * 4 + [make_event()["trigger"]["grad_norm"]] + [0.5] * 35) + "\n")
    run = read_run(tmp_path)
    assert run.metrics and not any("left out" in note for note in run.notes)
    log.write_text(console([0.5] * 40) + "\n")
    assert read_run(tmp_path, log).metrics, "it was named"


def test_what_is_missing_is_said(tmp_path):
    alone = read_run(write_run(tmp_path / "log", metrics=make_metrics()))
    assert alone.metrics and alone.events_root is None and alone.notes == []
    calm = read_run(write_run(tmp_path / "calm", [], metrics=make_metrics()))
    assert calm.notes == ["events.jsonl is empty: no spike was localized."]
    for trainer, way in (("verl 0.9.1", "trainer.logger"), ("trl 1.16.0", "trainer_state.json")):
        run = read_run(write_run(tmp_path / trainer, [make_event(run={"trainer": trainer})]))
        assert len(run.events) == 1
        assert run.notes[0].startswith("No metrics were found with the events") and way in run.notes[0]


def test_refusals_are_one_sentence_each(tmp_path):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("nothing of a run")
    for name in "ab":
        write_run(tmp_path / "several" / name, [make_event()])
    broken = write_run(tmp_path / "broken", [])
    (broken / "gradloc" / "events.jsonl").write_text("{")
    for folder, words in [
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "empty", "holds no run's log. What can be read"),
        (other, "holds no run's log (notes.txt cannot be read as logs). What can be read"),
        (other / "notes.txt", "has no metrics that can be read. To read lines of another form, give --pattern"),
        (tmp_path / "several", "several runs are under this folder"),
        (broken, "holds no event that can be read"),
    ]:
        with pytest.raises(ReportError) as caught:
            read_run(folder)
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_record_cannot_send_the_reader_out_of_its_folder(tmp_path):
    write_run(tmp_path / "other", [make_event()])
    event = make_event(folder="../../other/gradloc/events/step000005-epoch0-mini0")
    run = read_run(write_run(tmp_path / "run", [event]) / "gradloc" / "events.jsonl")
    sequences, note = read_sequences(run.events_root, run.events[0])
    assert sequences == [] and "without a bundle" in note


@pytest.mark.parametrize("content", [None, "{", "[]", '{"sequences": [{"token_ids": "no"}]}'])
def test_a_missing_or_broken_sequences_file_is_a_sentence(tmp_path, content):
    run = read_run(write_run(tmp_path, [make_event()]))
    file = run.events_root / run.events[0].folder / "sequences.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    sequences, note = read_sequences(run.events_root, run.events[0])
    assert sequences == []
    assert ("has no sequences.json" if content is None else "cannot be read") in note


def test_pythons_own_nan_and_values_that_are_no_numbers_are_no_obstacle(tmp_path):
    data = {MEAN: float("nan"), "text": "word", "list": [1], "flag": True, "number": "2.5"}
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    metrics = read_run(tmp_path).metrics
    assert math.isnan(metrics.get(MEAN)[0])
    assert metrics.finite(MEAN) == []
    assert set(metrics.series) == {MEAN, "number"}


def test_the_verdict_s_own_line_is_no_step_and_tells_of_events_that_are_elsewhere(tmp_path):
    rows = make_metrics(6)
    told = {"gradloc/verdict": ["At step 5 the gradient norm was 748."], "gradloc/culprits": [{"token": " is"}]}
    write_run(tmp_path, metrics=[*rows[:4], {"step": 5, "data": told}, *rows[4:]])
    run = read_run(tmp_path)
    assert run.metrics.steps == [1, 2, 3, 4, 5, 6] and run.metrics.get(MEAN)[4] == 100.0
    assert run.notes[0].startswith("metrics.jsonl has sentences on 1 event whose folder is not here")
    assert run.notes[1] == told["gradloc/verdict"][0]
    write_run(tmp_path, [make_event()])
    assert [note for note in read_run(tmp_path).notes if "has sentences on" in note] == []


def test_metrics_elsewhere_can_be_named(tmp_path):
    folder = write_run(tmp_path / "run", [make_event()])
    write_run(tmp_path / "logs", metrics=make_metrics(4, ()))
    assert read_run(folder, tmp_path / "logs" / "metrics.jsonl").metrics.steps == [1, 2, 3, 4]


def test_the_folder_of_events_of_a_run_without_any_leads_to_the_run(tmp_path):
    with pytest.raises(ReportError, match=f"no event was written there: name {tmp_path}"):
        read_run(tmp_path / "gradloc")


@pytest.mark.parametrize(("at", "is_explained"), [("last_update", True), ("batch", False), ("undecided", False)])
def test_a_link_other_than_the_batch_explains_a_spike_that_no_token_made(at, is_explained):
    event = replace(read(Event, make_event(culprits=[])), fault=Fault(at))
    event = replace(event, certificate=replace(event.certificate, verdict="not_explained"))
    assert row_of(event).is_explained == is_explained
