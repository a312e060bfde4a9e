# SPDX-License-Identifier: Apache-2.0
"""An environment is made once, and again if its sources change or it was interrupted."""

import sys

import pytest

from lab.experiments import environment
from lab.experiments.environment import Environment
from lab.experiments.errors import ExperimentError


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The arguments of pip and venv, which make no more than the interpreter; pip fails on `bad.txt`."""
    run = []

    def output_of(command, problem, **_):
        run.append(command[command.index("-m") + 1 :])
        if command[2] == "venv":
            environment.Path(command[3], "bin").mkdir(parents=True)
            environment.Path(command[3], "bin", "python").symlink_to(sys.executable)
        if command[-1].endswith("bad.txt"):
            raise ExperimentError(problem)

    monkeypatch.setattr(environment, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(environment, "_requirements", tmp_path.joinpath)
    monkeypatch.setattr(environment, "output_of", output_of)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: None)
    return run


def made(commands, *names, **given):
    """Make an environment of these files; return the last argument of each command that ran."""
    commands.clear()
    python = environment.ensure_python(Environment("venv-any", names, **given))
    assert python == str(environment.CACHE / "venv-any" / "bin" / "python")
    return [environment.Path(command[-1]).name for command in commands]


def test_an_environment_is_made_once_for_its_files(commands, tmp_path):
    for name in ("any.txt", "more.txt", "alone.txt"):
        (tmp_path / name).write_text("numpy==1\ntorch==2.13.0\n")
    whole = made(commands, "any.txt", "more.txt", without_deps=("alone.txt",))
    assert whole[:5] == ["venv-any", "torch==2.13.0", "any.txt", "more.txt", "alone.txt"] and len(whole) == 6
    assert "--no-deps" in commands[4] and "--no-deps" in commands[5] and "--no-deps" not in commands[3]
    assert made(commands, "any.txt", "more.txt", without_deps=("alone.txt",)) == []
    (tmp_path / "any.txt").write_text("torch==2.14.0\n")
    assert made(commands, "any.txt", "more.txt", without_deps=("alone.txt",))[:2] == ["venv-any", "torch==2.14.0"]


def test_what_was_cut_off_or_lost_its_python_begins_anew(commands, tmp_path):
    for name in ("any.txt", "bad.txt"):
        (tmp_path / name).write_text("torch==2.13.0\n")
    for _ in range(2):
        with pytest.raises(ExperimentError, match="pip could not install"):
            made(commands, "any.txt", "bad.txt")
        assert commands[0][0] == "venv"
    assert made(commands, "any.txt") != [] and made(commands, "any.txt") == []
    (environment.CACHE / "venv-any" / "bin" / "python").unlink()
    assert made(commands, "any.txt")[0] == "venv-any"


def test_a_python_that_the_user_names_is_taken(commands, monkeypatch):
    monkeypatch.setenv("ANY_PYTHON", "/a/python")
    assert environment.ensure_python(Environment("venv-any", ("any.txt",), variable="ANY_PYTHON")) == "/a/python"
    assert commands == []
