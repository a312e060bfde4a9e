# SPDX-License-Identifier: Apache-2.0
"""Events on disk: whole lines, names of their own, and files that whoever may read one may read."""

import fcntl
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradloc.record import Event, Trigger, Turn, turns_in
from gradloc.record.store import EventStore, plain
from gradloc.report.runs.events import Events, read_events, recover
from tests.record import killed
from tests.report.builder import REPO


def test_a_cut_off_line_does_not_spoil_the_next_event(tmp_path):
    store = EventStore(str(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"a": 1}\n{"cut": ')
    store.append(Event(event_id="é", trigger=Trigger(grad_norm=math.nan, threshold=math.inf)))
    lines = (tmp_path / "events.jsonl").read_text("utf-8").splitlines()
    assert lines[0] == '{"a": 1}' and '"event_id": "é"' in lines[-1]
    trigger = json.loads(lines[-1])["trigger"]
    assert (trigger["grad_norm"], trigger["threshold"]) == ("NaN", "Infinity")


def test_an_event_waits_for_another_process_that_is_writing_one(tmp_path):
    with open(tmp_path / "events.jsonl", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = threading.Thread(target=EventStore(str(tmp_path)).append, args=(Event(event_id="a"),))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        file.write(b'{"b": 1}\n')
    writer.join(10)
    first, second = (tmp_path / "events.jsonl").read_text().splitlines()
    assert first == '{"b": 1}' and json.loads(second)["event_id"] == "a"


def test_a_new_run_learns_that_the_folder_has_an_earlier_one_s_events(tmp_path):
    store = EventStore(str(tmp_path / "made" / "later"))
    assert store.about() == ""
    store.append(Event(event_id="a"))
    assert "earlier run" in store.about()


def test_event_names_are_unique_when_a_resumed_run_passes_a_step_again(tmp_path):
    store = EventStore(str(tmp_path))
    with store.new_event(7, 0, 1) as first, EventStore(str(tmp_path)).new_event(7, 0, 1) as second:
        store.write_folder(first, {}, {"sequences": {}})
    with store.new_event(7, 0, 1) as third:
        assert second == third == f"{first}-2", "a name that was taken in vain is free again"
    assert [path.name for path in (tmp_path / "events").iterdir()] == [first]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_who_may_read_what_is_written_is_the_umask_s_to_say(umask, tmp_path):
    before = os.umask(umask)
    try:
        store = EventStore(str(tmp_path / "run"))
        with store.new_event(7, 0, 1) as name:
            store.write_folder(name, {"x": torch.ones(2)}, {"meta": {}})
            store.append(Event(event_id=name))
    finally:
        os.umask(before)
    written = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*") if path.name[0] != "."}
    assert {"batch.safetensors", "meta.json", "events.jsonl"} <= {path.name for path in written}
    for path, mode in written.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, path


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, None),
        (True, True),
        (3, 3),
        ("é", "é"),
        ({1: (2.5, math.nan)}, {"1": [2.5, "NaN"]}),
        ([math.inf, -math.inf], ["Infinity", "-Infinity"]),
        (np.float32(0.5), 0.5),
        (torch.tensor(7), 7),
        (torch.tensor(math.inf), "Infinity"),
        (Path("/a/b"), "/a/b"),
        (Turn(2, 3, 4), {"number": 2, "num_turns": 3, "num_before": 4}),
    ],
)
def test_whatever_a_record_holds_is_stored_as_json_has_it(value, stored):
    assert plain(value) == stored and type(plain(value)) is type(stored)
    json.dumps(stored, allow_nan=False)


def test_a_folder_holds_what_replays_its_event(tmp_path):
    store, tensors = EventStore(str(tmp_path)), {"x": torch.arange(6.0).view(2, 3).T}
    with store.new_event(7, 0, 1) as name:
        folder = tmp_path / store.write_folder(name, tensors, {"meta": {"n": math.nan}}, {"p.png": b"1"})
    assert sorted(path.name for path in folder.iterdir()) == ["batch.safetensors", "meta.json", "p.png"]
    assert torch.equal(load_file(folder / "batch.safetensors")["x"], tensors["x"])
    assert (folder / "meta.json").read_text() == '{"n": "NaN"}\n' and (folder / "p.png").read_bytes() == b"1"


def test_what_another_process_makes_of_a_name_that_was_just_written_stays(tmp_path):
    store = EventStore(str(tmp_path))
    with store.new_event(7, 0, 1) as name:
        store.write_folder(name, {}, {"meta": {}})
        (other := tmp_path / "events" / f".{name}.partial").mkdir()
    assert other.exists()
    with store.new_event(8, 0, 1) as name:  # a full disk: nothing was written
        pass
    assert not (tmp_path / "events" / f".{name}.partial").exists()


def _whole(folder):
    """The events that a reader finds; each of them whole."""
    events, notes = read_events(folder / "events.jsonl") if (folder / "events.jsonl").exists() else (Events(), [])
    assert all("cut off" in note or "is not JSON" in note for note in notes), notes  # of a line that was cut off
    recovered, notes = recover(folder, events)
    assert not any("without a whole" in note for note in notes), notes
    found = [*events, *recovered]
    assert all(event.verdict == killed.TEXT for event in found)
    return found


@pytest.mark.full
@pytest.mark.parametrize("rounds", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_at_any_write_loses_nothing_of_its_own_nor_of_another_s(tmp_path, rounds):
    lines = []
    with subprocess.Popen([sys.executable, "-m", killed.__name__, tmp_path, str(rounds)], cwd=REPO, stdout=-1) as made:
        for line in made.stdout:
            lines.append(json.loads(line))
            _whole(tmp_path)  # a reader meanwhile
            if (state := tmp_path / "gradloc.json").exists():
                ((_, value),) = [item for item in json.loads(state.read_text()).items() if item[0] != "schema_version"]
                assert value["text"] == killed.TEXT
    assert made.returncode == 0
    found = _whole(tmp_path)
    names = [event.event_id for event in found]
    listed = {event.event_id for event in read_events(tmp_path / "events.jsonl")[0]}  # not only by its folder
    written = {line["written"] for line in lines if "written" in line}
    assert written <= listed and len(names) == len(set(names)) and len(written) == 2 * rounds
    victims = {line["step"]: line["killed"] for line in lines if "step" in line}
    writes = [write for _, write in sorted(victims.items())]
    cycle = writes[: writes.index("")]
    assert {"in serialize_file", "in write", "before rename", "before fsync", "before replace"} <= set(cycle)
    renamed = cycle.index("before rename") + 1
    kept = {event.step.global_step for event in found if event.trigger.kind == "victim"}
    assert kept == {step for step in victims if (step - 1) % (len(cycle) + 1) >= renamed}


@pytest.mark.parametrize(
    ("mask", "turns"),
    [([], []), ([0, 0], []), ([1, 0, 1], [(0, 3)]), ([0, 1, 1, 0, 0, 1], [(1, 3), (5, 6)]), ([1] * 4, [(0, 4)])],
)
def test_two_tokens_outside_of_the_loss_part_two_turns(mask, turns):
    assert [(turn.start, turn.stop) for turn in turns_in(mask)] == turns
