# SPDX-License-Identifier: Apache-2.0
"""Experiments with arms: what is run in which order, and how it ends."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import launch, suite
from experiments.errors import ExperimentError, UsageError
from experiments.experiment import Arm, Experiment
from tests.experiments.conftest import write_suite

DUEL = Experiment(
    "duel",
    "two ways of one thing",
    arms=(Arm("plain", "the config as it is"), Arm("loud", "two values replaced", ("a.b=1", "c=[x, y]", "~d"))),
    seeds=(3, 4),
)


@pytest.mark.parametrize(
    ("arms", "seeds", "of_its_own", "folders"),
    [
        (None, None, (3, 4), ["plain-seed3", "plain-seed4", "loud-seed3", "loud-seed4"]),
        ("loud", "7", (3, 4), ["loud-seed7"]),
        (None, None, (), ["plain", "loud"]),
    ],
    ids=["arm by arm", "a part", "without seeds"],
)
def test_every_arm_runs_with_every_seed(arms, seeds, of_its_own, folders):
    given = ["a.b=2"] if of_its_own else ["seed=5"]
    cells = suite.plan(replace(DUEL, seeds=of_its_own), arms, seeds, given)
    assert [cell["folder"] for cell in cells] == folders
    seed = [f"seed={cells[-1]['seed']}"] if of_its_own else []
    assert cells[-1]["overrides"] == ["a.b=1", "c=[x, y]", "~d", *seed, *given], "the user's come last and so win"


ONE = Experiment("one", "it")


@pytest.mark.parametrize(
    "experiment, arms, seeds, given, problem",
    [
        (DUEL, "other", None, [], "has no arm 'other': there are plain, loud"),
        (DUEL, "plain,", None, [], "has no arm ''"),
        (DUEL, None, "one", [], "--seeds one is not a list of whole numbers"),
        (DUEL, None, "", [], "is not a list of whole numbers"),
        (DUEL, None, None, ["seed=3"], "write --seeds N instead of seed=N"),
        (ONE, "a", None, [], "leave --arms out"),
        (ONE, None, "1", [], "leave --seeds out"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(experiment, arms, seeds, given, problem):
    with pytest.raises(UsageError, match=problem):
        suite.plan(experiment, arms, seeds, given)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs the suite with a Python one-liner in the trainer's place; returns its exit code."""
    folder = tmp_path / "suite"
    folder.mkdir()
    # The summary is a module that is found by PYTHONPATH, as a real one is.
    (tmp_path / "told.py").write_text(
        "import sys; from experiments import suite; from pathlib import Path\n"
        "cells = suite.read(Path(sys.argv[1]))['cells']\n"
        "print('told', *[(c['folder'], c['exit_code']) for c in cells])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")

    def run(code, summary_module="told"):
        experiment = replace(DUEL, summary_module=summary_module)

        def run_one(overrides, into):
            into.mkdir()
            command = [sys.executable, "-c", code, *overrides]
            return launch.run(command, into / "console.log", is_brief=True)

        cells = suite.plan(experiment, None, None, [])
        return suite.run(experiment, cells, folder, run_one, sys.executable), folder

    return run


def test_each_run_has_its_folder_its_line_of_progress_and_the_summary_comes_last(stage, capfd):
    code, folder = stage("print('step:1 - actor/grad_norm:2.0')")
    said = capfd.readouterr().out
    assert code == 0
    for number, name in enumerate(("plain-seed3", "plain-seed4", "loud-seed3", "loud-seed4"), 1):
        assert f"run {number} of 4: {name}" in said
        assert (folder / name / "console.log").is_file()
    assert said.count("step  1  grad norm 2") == 4 and said.count("to go") == 3
    assert "4 of 4 runs ended well" in said
    assert said.index("told ('plain-seed3', 0)") > said.index("ended well")


def test_a_failed_run_is_named_and_the_others_go_on(stage, capfd):
    code, folder = stage("import sys; sys.exit(5 if 'seed=3' in sys.argv else 0)")
    said = capfd.readouterr().out
    assert code == 1
    assert "plain-seed3 FAILED with exit code 5; the others go on." in said
    assert "2 of 4 runs ended well" in said and "failed: plain-seed3, loud-seed3" in said
    assert "told ('plain-seed3', 5) ('plain-seed4', 0)" in said
    cells = json.loads((folder / "suite.json").read_text())["cells"]
    assert [cell["exit_code"] for cell in cells] == [5, 0, 5, 0]


def test_an_interrupt_ends_the_suite(stage, capfd):
    code, folder = stage("import sys; sys.exit(130)")
    assert code == 130 and "told" not in capfd.readouterr().out
    cells = suite.read(folder)["cells"]
    assert [cell["exit_code"] for cell in cells] == [130, None, None, None]


def test_a_suite_that_was_cut_off_goes_on_and_keeps_what_ended_well(stage, capfd):
    _, folder = stage("import sys; sys.exit(130 if 'a.b=1' in sys.argv else 0)")
    capfd.readouterr()
    code, _ = stage("print('step:1 - actor/grad_norm:2.0')")
    said = capfd.readouterr().out
    assert code == 0 and "2 of 4 runs have ended well already" in said
    assert "run 1 of 2: loud-seed3" in said and "plain-seed3 (" not in said
    assert "4 of 4 runs ended well" in said
    assert (folder / "loud-seed3.cut").is_dir() and not (folder / "loud-seed4.cut").exists()


def test_another_part_of_a_suite_joins_what_was_run_before(tmp_path):
    def run(seeds, given=()):
        def run_one(overrides, into):
            into.mkdir()
            started.append(into.name)
            return 0

        started = []
        cells = suite.plan(DUEL, "plain", seeds, list(given))
        assert suite.run(DUEL, cells, tmp_path, run_one, sys.executable) == 0
        return started, [cell["folder"] for cell in suite.read(tmp_path)["cells"]]

    assert run("3") == (["plain-seed3"], ["plain-seed3"])
    assert run("4") == (["plain-seed4"], ["plain-seed4", "plain-seed3"])
    # With other overrides it is another run.
    assert run("3", ["a.b=9"]) == (["plain-seed3"], ["plain-seed3", "plain-seed4"])
    assert (tmp_path / "plain-seed3.cut").is_dir()
    with pytest.raises(ExperimentError, match="holds runs of duel, not of other"):
        suite.run(replace(DUEL, name="other"), suite.plan(DUEL, "plain", "3", []), tmp_path, None, sys.executable)


@pytest.mark.parametrize(("summary", "code"), [("no_such", 1), (None, 0)])
def test_a_summary_that_fails_fails_the_suite_and_there_need_be_none(stage, summary, code):
    assert stage("pass", summary)[0] == code


def test_a_suite_that_was_cut_off_while_writing_is_refused(tmp_path):
    (tmp_path / "suite.json").write_text('{"cells": [')
    with pytest.raises(ExperimentError, match="cut off"):
        suite.read(tmp_path)


@pytest.mark.parametrize(
    ("codes", "metrics", "problem"),
    [
        ({"one": 1}, "", "no run in .* ended well"),
        ({"one": 0}, None, "cannot be read"),
        ({"one": 0}, "{", "cannot be read"),
        ({"one": 0}, '{"step": 1, "data": {}}', "has no step"),
        ({}, "", "has no suite.json"),
    ],
)
def test_a_summary_of_what_cannot_be_read_is_one_sentence(tmp_path, capsys, codes, metrics, problem):
    (tmp_path / "one").mkdir()
    if codes:
        write_suite(tmp_path, **codes)
    if metrics is not None:
        (tmp_path / "one" / "metrics.jsonl").write_text(metrics)

    def make(runs, _folder):
        return [[[str(suite.read_steps(folder, "norm"))] for folder, _ in runs]]

    assert suite.print_summary("What it is.", "", make, [str(tmp_path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(f"summary: .*{problem}", said)


def test_lines_of_one_step_are_joined(tmp_path):
    lines = [(1, {"norm": 2.0}), (1, {"verdict": "a sentence"}), (2, {"verdict": "another"})]
    text = "".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert suite.read_steps(tmp_path, "norm") == {1: {"norm": 2.0, "verdict": "a sentence"}}
