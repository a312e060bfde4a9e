# SPDX-License-Identifier: Apache-2.0
"""Events on disk: whole lines, names of their own, and files that whoever may read one may read."""

import math

import torch

from gradloc.record.store import EventStore


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
