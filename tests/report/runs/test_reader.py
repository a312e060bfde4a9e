# SPDX-License-Identifier: Apache-2.0
"""Whatever state a run's folder is in: one clear sentence, and what can be shown is shown."""

import json
import math

import pytest

from gradloc.report.errors import ReportError
from gradloc.report.runs.events import read_sequences
from gradloc.report.runs.run import read_run
from tests.report.builder import make_culprit, make_event, make_metrics, make_sequence, write_run


def test_a_whole_run_is_read_without_a_note(tmp_path):
    run = read_run(write_run(tmp_path / "run", [make_event()], metrics=make_metrics()))
    assert (len(run.events), len(run.metrics.steps), run.notes) == (1, 20, [])
    assert run.name == "tests / report"
    assert run.events[0].culprits[0].tokens == (" is",)


@pytest.mark.parametrize("inside", ["", "gradloc", "gradloc/events.jsonl"])
def test_a_run_can_be_named_by_its_folder_its_events_folder_or_its_file(tmp_path, inside):
    folder = write_run(tmp_path / "run", [make_event()], metrics=make_metrics())
    run = read_run(folder / inside)
    assert len(run.events) == 1
    assert run.metrics


def test_numbers_that_json_cannot_spell_become_floats(tmp_path):
    event = make_event(culprits=[make_culprit(advantage="NaN", grad_norm="Infinity")])
    event["trigger"]["grad_norm"] = "-Infinity"
    found = read_run(write_run(tmp_path, [event])).events[0]
    assert math.isnan(found.culprits[0].advantage)
    assert found.culprits[0].grad_norm == math.inf
    assert found.trigger.grad_norm == -math.inf


@pytest.mark.parametrize("text", ["NaN", "null", "1", "true"])
def test_a_token_that_looks_like_a_number_stays_text(tmp_path, text):
    found = read_run(write_run(tmp_path, [make_event(culprits=[make_culprit(token=text)])]))
    assert found.events[0].culprits[0].tokens == (text,)


def test_a_last_line_that_is_cut_off_is_left_out_with_a_sentence(tmp_path):
    folder = write_run(tmp_path, [make_event(1), make_event(2)], metrics=make_metrics())
    path = folder / "gradloc" / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    run = read_run(folder)
    assert [event.step.global_step for event in run.events] == [1]
    assert run.notes[0] == "The last line of events.jsonl (line 2) is cut off and was left out."


def keep_meta(folder, events):
    """Give each event's folder the meta.json that the trainer writes there."""
    for event in events:
        meta = {"schema_version": 1, "actor": {"grad_clip": 1.0}, "event": event}
        (folder / "gradloc" / event["folder"] / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("torn", ["cut", "empty", "gone"])
def test_events_that_a_torn_events_file_lost_are_read_from_their_folders(tmp_path, torn):
    events = [make_event(step) for step in (1, 2, 3)]
    folder = write_run(tmp_path, events, metrics=make_metrics())
    keep_meta(folder, events)
    path = folder / "gradloc" / "events.jsonl"
    if torn == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif torn == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    run = read_run(folder)
    assert [event.step.global_step for event in run.events] == [1, 2, 3]
    assert run.events[2].culprits[0].text == " is"
    assert any("that events.jsonl does not list: read from their folder" in note for note in run.notes)
    assert read_sequences(run.events_root, run.events[2])[0]


def test_an_event_folder_without_a_whole_meta_is_named(tmp_path):
    folder = write_run(tmp_path, [make_event(1)], metrics=make_metrics())
    torn = folder / "gradloc" / "events" / "step000002-epoch0-mini0"
    torn.mkdir()
    (torn / "meta.json").write_text('{"event": {"event_id"')
    run = read_run(folder)
    assert len(run.events) == 1
    assert run.notes == ["1 event folder without a whole meta.json, and not in events.jsonl: step000002-epoch0-mini0."]


def test_a_folder_of_one_event_is_that_event(tmp_path):
    events = [make_event(step) for step in (1, 2, 3)]
    folder = write_run(tmp_path, events, metrics=make_metrics())
    keep_meta(folder, events)
    run = read_run(folder / "gradloc" / "events" / "step000002-epoch0-mini0")
    assert [event.step.global_step for event in run.events] == [2]
    assert run.metrics


@pytest.mark.parametrize("line", ["{}", "[]", '{"loss": 1}'])
def test_a_record_of_something_else_is_no_event(tmp_path, line):
    folder = write_run(tmp_path, [make_event()], metrics=make_metrics())
    path = folder / "gradloc" / "events.jsonl"
    path.write_text(line + "\n" + path.read_text())
    run = read_run(folder)
    assert len(run.events) == 1
    assert run.notes == ["Line 1 of events.jsonl is no event record and was left out."]


def test_a_broken_line_in_the_middle_costs_only_itself(tmp_path):
    folder = write_run(tmp_path, [make_event(1), make_event(2), make_event(3)], metrics=[])
    path = folder / "gradloc" / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    run = read_run(folder)
    assert [event.step.global_step for event in run.events] == [1, 3]
    assert "Line 2 of events.jsonl is not JSON and was left out." in run.notes


def test_another_schema_version_is_named_and_shown_as_far_as_it_can_be_read(tmp_path):
    event = make_event(schema_version=7, new_field={"of": "the future"})
    run = read_run(write_run(tmp_path, [event], metrics=make_metrics()))
    assert len(run.events) == 1
    assert "schema version 7" in run.notes[0]
    assert "knows version 1" in run.notes[0]


def test_another_schema_version_that_cannot_be_read_names_the_field(tmp_path):
    event = make_event(schema_version=7) | {"culprits": {"not": "a list"}}
    run = read_run(write_run(tmp_path, [event, make_event()], metrics=make_metrics()))
    assert len(run.events) == 1
    assert "schema version 7" in run.notes[0]
    assert "culprits" in run.notes[0]


def test_two_events_of_one_name_stay_apart(tmp_path):
    run = read_run(write_run(tmp_path, [make_event(1), make_event(1)], metrics=make_metrics()))
    assert len({event.event_id for event in run.events}) == 2


def test_metrics_without_events_are_a_log_to_be_diagnosed(tmp_path):
    run = read_run(write_run(tmp_path, metrics=make_metrics()))
    assert run.metrics and run.events_root is None and run.notes == []


def test_an_empty_events_file_beside_metrics_says_that_nothing_spiked(tmp_path):
    run = read_run(write_run(tmp_path, [], metrics=make_metrics()))
    assert run.notes == ["events.jsonl is empty: no spike was localized."]


@pytest.mark.parametrize(("trainer", "way"), [("verl 0.9.1", "trainer.logger"), ("trl 1.16.0", "trainer_state.json")])
def test_events_without_metrics_are_shown_with_a_sentence(tmp_path, trainer, way):
    event = make_event()
    event["run"]["trainer"] = trainer
    run = read_run(write_run(tmp_path, [event]))
    assert len(run.events) == 1
    assert run.notes[0].startswith("No metrics were found beside the events") and way in run.notes[0]


def test_refusals_are_one_sentence_each(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("nothing of a run")
    several = tmp_path / "several"
    write_run(several / "a", [make_event()])
    write_run(several / "b", [make_event()])
    broken = write_run(tmp_path / "broken", [])
    (broken / "gradloc" / "events.jsonl").write_text("{")
    for folder, words in [
        (tmp_path / "missing", "does not exist"),
        (empty, "is empty"),
        (other, "holds no run's log (notes.txt cannot be read as logs): name a folder or file with one"),
        (other / "notes.txt", "has no metrics that can be read: name a log of training steps"),
        (several, "several runs lie under this folder"),
        (broken, "holds no event that can be read"),
    ]:
        with pytest.raises(ReportError) as caught:
            read_run(folder)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_bundle_is_a_sentence_and_no_sequences(tmp_path):
    folder = write_run(tmp_path, [make_event()])
    (folder / "gradloc" / "events" / "step000005-epoch0-mini0" / "sequences.json").unlink()
    run = read_run(folder)
    sequences, note = read_sequences(run.events_root, run.events[0])
    assert sequences == []
    assert note.startswith("The bundle of event step000005-epoch0-mini0 has no sequences.json")


def test_a_record_cannot_send_the_reader_out_of_its_folder(tmp_path):
    write_run(tmp_path / "other", [make_event()])
    event = make_event(folder="../../other/gradloc/events/step000005-epoch0-mini0")
    run = read_run(write_run(tmp_path / "run", [event]) / "gradloc" / "events.jsonl")
    sequences, note = read_sequences(run.events_root, run.events[0])
    assert sequences == []
    assert "without a bundle" in note


@pytest.mark.parametrize("content", ["{", "[]", '{"sequences": [{"token_ids": "no"}]}'])
def test_a_broken_sequences_file_is_a_sentence(tmp_path, content):
    run = read_run(write_run(tmp_path, [make_event()]))
    (run.events_root / run.events[0].folder / "sequences.json").write_text(content)
    sequences, note = read_sequences(run.events_root, run.events[0])
    assert sequences == []
    assert "cannot be read" in note


def test_a_lone_surrogate_in_the_file_is_read(tmp_path):
    event = make_event()
    run = read_run(write_run(tmp_path, [event], {event["event_id"]: [make_sequence(tokens=["\ud800"])]}))
    sequences, _ = read_sequences(run.events_root, run.events[0])
    assert json.dumps(sequences[0].tokens) == '["\\ud800"]'
