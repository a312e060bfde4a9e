# SPDX-License-Identifier: Apache-2.0
"""Events on disk: whole lines, names of their own, and files that whoever may read one may read."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradloc.record import Event, Turn, turns_in
from gradloc.record.reading import read
from gradloc.record.store import EventStore, plain


def test_a_cut_off_line_does_not_spoil_the_next_event(tmp_path):
    store = EventStore(str(tmp_path))
    (tmp_path / "events.jsonl").write_text('{"a": 1}\n{"cut": ')
    store.append({"b": math.nan, "c": [math.inf, -math.inf]})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[0] == '{"a": 1}' and lines[-1] == '{"b": "NaN", "c": ["Infinity", "-Infinity"]}'


def test_event_names_are_unique_when_a_resumed_run_passes_a_step_again(tmp_path):
    store = EventStore(str(tmp_path))
    first = store.new_id(7, 0, 1)
    store.write_folder(first, {}, {"sequences": {}})
    assert store.new_id(7, 0, 1) == f"{first}-2"


def test_who_may_read_an_event_may_replay_it(tmp_path):
    folder = tmp_path / EventStore(str(tmp_path)).write_folder("a", {"x": torch.ones(2)}, {"meta": {}})
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["batch.safetensors"] == modes["meta.json"]


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


def test_a_record_is_read_as_it_was_and_what_is_left_out_has_its_default():
    assert read(Event, json.loads(json.dumps(plain(Event())))) == read(Event, {}) == Event()


def test_a_folder_is_written_anew_over_what_was_cut_off(tmp_path):
    store = EventStore(str(tmp_path))
    partial = tmp_path / "events" / ".a.partial"
    partial.mkdir(parents=True)
    (partial / "half.json").write_text("{")
    tensors = {"x": torch.arange(6.0).view(2, 3).T}
    assert store.write_folder("a", tensors, {"meta": {"n": math.nan}}, {"p.png": b"1"}) == "events/a"
    folder = tmp_path / "events" / "a"
    assert sorted(path.name for path in folder.iterdir()) == ["batch.safetensors", "meta.json", "p.png"]
    assert torch.equal(load_file(folder / "batch.safetensors")["x"], tensors["x"])
    assert (folder / "meta.json").read_text() == '{"n": "NaN"}\n' and (folder / "p.png").read_bytes() == b"1"


def test_an_event_s_line_is_in_the_script_it_was_written_in(tmp_path):
    EventStore(str(tmp_path)).append({"b": "é"})
    EventStore(str(tmp_path)).append({"a": 1})
    assert (tmp_path / "events.jsonl").read_bytes() == '{"b": "é"}\n{"a": 1}\n'.encode()


@pytest.mark.parametrize(
    ("mask", "turns"),
    [([], []), ([0, 0], []), ([1, 0, 1], [(0, 3)]), ([0, 1, 1, 0, 0, 1], [(1, 3), (5, 6)]), ([1] * 4, [(0, 4)])],
)
def test_two_tokens_outside_of_the_loss_part_two_turns(mask, turns):
    assert [(turn.start, turn.stop) for turn in turns_in(mask)] == turns
