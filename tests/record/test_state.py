# SPDX-License-Identifier: Apache-2.0
"""What was learned comes back from beside a checkpoint; what is not ours is said, and starts anew."""

import json

import pytest

from gradloc.record.store import load_states, save_states


class Part:
    def __init__(self, value=None):
        self.value = value

    def state(self):
        return {"value": self.value}

    def load_state(self, state):
        if state["value"] == []:
            raise IndexError("an empty history")
        self.value = state["value"]


def test_parts_come_back_by_their_names(tmp_path):
    assert save_states({"driver": Part(1), "health": Part([2])}, str(tmp_path)) is True
    assert [path.name for path in tmp_path.iterdir()] == ["gradloc.json"], "nothing half-written stays"
    resumed = {"health": Part(), "new": Part("fresh")}
    load_states(resumed, str(tmp_path))
    assert resumed["health"].value == [2] and resumed["new"].value == "fresh"
    assert json.loads((tmp_path / "gradloc.json").read_text())["schema_version"]


def test_without_parts_or_a_file_nothing_happens(tmp_path, caplog):
    assert save_states({}, str(tmp_path)) is False and not list(tmp_path.iterdir())
    part = Part(3)
    load_states({"driver": part}, str(tmp_path))
    assert part.value == 3
    (tmp_path / "gradloc.json").write_text("no JSON")
    load_states({}, str(tmp_path))
    assert not caplog.text


def test_a_folder_that_cannot_be_written_is_said(tmp_path, caplog):
    assert save_states({"driver": Part(1)}, str(tmp_path / "absent")) is False
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("text", ["no JSON", "3", "\udcff"])
def test_a_file_that_cannot_be_read_is_said_and_all_starts_anew(tmp_path, caplog, text):
    (tmp_path / "gradloc.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    part = Part(3)
    load_states({"driver": part}, str(tmp_path))
    assert part.value == 3 and "could not be read" in caplog.text


@pytest.mark.parametrize("state", ['{"of": "another"}', "5", "[]", '{"value": []}'])
def test_a_part_whose_state_is_not_ours_starts_anew_and_the_others_do_not(tmp_path, caplog, state):
    (tmp_path / "gradloc.json").write_text(f'{{"driver": {state}, "health": {{"value": 5}}}}')
    parts = {"driver": Part(3), "health": Part()}
    load_states(parts, str(tmp_path))
    assert (parts["driver"].value, parts["health"].value) == (3, 5)
    assert "the state of driver" in caplog.text and "the state of health" not in caplog.text
