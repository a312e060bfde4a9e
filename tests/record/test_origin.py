# SPDX-License-Identifier: Apache-2.0
"""What made a run is recorded with its events, and nothing of it can keep a run from starting."""

import json
import re
import subprocess

import jsonschema
import pytest

from gradloc import __version__
from gradloc.record import Event, Run
from gradloc.record.origin import now, with_origin
from gradloc.record.store import plain
from tests.report.builder import SCHEMAS


def made(settings: dict | None = None, trainer: str = "verl") -> Run:
    return with_origin(Run("p", "e", model="Qwen/Qwen3-4B"), settings or {"lr": 1e-6}, trainer)


def test_versions_model_and_digest_are_there_and_fit_the_schema():
    found = made(trainer="pytest")
    assert (found.trainer, found.gradloc, found.model) == (f"pytest {pytest.__version__}", __version__, "Qwen/Qwen3-4B")
    assert re.fullmatch(r"[0-9a-f]{12}", found.config)
    document = plain(Event(event_id="e", verdict="", run=found, time=now()))
    schema = json.loads((SCHEMAS / "event.v2.schema.json").read_text())
    part = {**schema["$defs"]["Run"], "$defs": schema["$defs"]}
    jsonschema.validate(document["run"], part)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["time"])


def test_the_digest_is_the_settings_whatever_their_order():
    assert made({"a": 1, "b": {"c": None}}).config == made({"b": {"c": None}, "a": 1}).config
    assert made({"a": 1}).config != made({"a": 2}).config
    assert with_origin(Run("p", "e"), {}, "torch").config is None, "a loop has no settings"


def test_the_commit_is_that_of_the_folder_and_says_where_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert made().commit is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1")
    for command in (["init", "-q"], ["add", "a"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    commit = made().commit
    assert re.fullmatch(r"[0-9a-f]{12}", commit)
    (tmp_path / "a").write_text("2")
    assert made().commit == f"{commit}-dirty"


def test_without_git_there_is_no_commit_and_without_the_trainer_no_version(monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = made(trainer="no_such_trainer")
    assert found.commit is found.trainer is None
