# SPDX-License-Identifier: Apache-2.0
"""Experiments with arms: what is run in which order, and how it ends."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.experiments import suite, summaries
from lab.experiments.catalog import Arm, Experiment
from lab.experiments.errors import ExperimentError, UsageError
from lab.experiments.llm import natural
from tests.experiments.conftest import write_lines, write_suite

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
        ("loud,loud", "7,07,7", (3, 4), ["loud-seed7"]),
        (None, None, (), ["plain", "loud"]),
    ],
    ids=["arm by arm", "a part", "each once", "without seeds"],
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
def run(tmp_path, monkeypatch):
    """Runs cells of the duel, which end as `code` says of their overrides; returns the exit code and who was run."""
    # The summary is a module that is found by PYTHONPATH, as a real one is.
    (tmp_path / "table_of_runs.py").write_text(
        "LEGEND = 'end of the summary'\n"
        "def make(runs, folder): return [[['summary', *(cell['folder'] for _, cell in runs)]]]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")

    def call(code=lambda overrides: 0, arms=None, seeds=None, given=(), summary="table_of_runs", name="duel"):
        def run_one(overrides, into):
            into.mkdir()
            started.append(into.name)
            return code(overrides)

        started = []
        experiment = replace(DUEL, summary_module=summary, name=name)
        cells = suite.plan(experiment, arms, seeds, list(given))
        return suite.run(experiment, cells, tmp_path, run_one, sys.executable), started

    return call


def ended(folder):
    """Each run's exit code in `suite.json`."""
    return {cell["folder"]: cell["exit_code"] for cell in suite.read(folder)["cells"]}


EVERY = ["plain-seed3", "plain-seed4", "loud-seed3", "loud-seed4"]


def test_each_run_has_its_folder_its_line_of_progress_and_the_summary_comes_last(run, capfd):
    assert run() == (0, EVERY)
    said = capfd.readouterr().out
    assert all(f"run {number} of 4: {name}" in said for number, name in enumerate(EVERY, 1))
    assert said.count("to go") == 3 and "4 of 4 runs ended well" in said
    assert said.index("summary  plain-seed3") > said.index("ended well")


def test_a_failed_run_is_named_and_the_others_go_on(run, tmp_path, capfd):
    assert run(lambda overrides: 5 if "seed=3" in overrides else 0) == (1, EVERY)
    said = capfd.readouterr().out
    assert "plain-seed3 FAILED with exit code 5; the others go on." in said
    assert "2 of 4 runs ended well" in said and "failed: plain-seed3, loud-seed3" in said
    assert "summary  plain-seed4  loud-seed4" in said
    assert list(ended(tmp_path).values()) == [5, 0, 5, 0]


def test_an_interrupt_ends_the_suite_which_goes_on_and_keeps_what_ended_well(run, tmp_path, capfd):
    assert run(lambda overrides: 130 if "a.b=1" in overrides else 0) == (130, EVERY[:3])
    assert "summary" not in capfd.readouterr().out
    assert list(ended(tmp_path).values()) == [0, 0, 130, None]
    assert run() == (0, EVERY[2:])
    said = capfd.readouterr().out
    assert "2 of 4 runs have ended well already" in said and "run 1 of 2: loud-seed3" in said
    assert "4 of 4 runs ended well" in said
    assert (tmp_path / "loud-seed3.cut").is_dir() and not (tmp_path / "loud-seed4.cut").exists()


def test_another_part_of_a_suite_joins_what_was_run_before(run, tmp_path):
    assert run(arms="plain", seeds="3") == (0, ["plain-seed3"])
    assert run(arms="plain", seeds="4") == (0, ["plain-seed4"])
    assert list(ended(tmp_path)) == ["plain-seed4", "plain-seed3"]
    # With other overrides it is another run.
    for folder in ("plain-seed3.cut", "plain-seed3.cut-2"):
        assert run(arms="plain", seeds="3", given=[f"a.b={folder}"]) == (0, ["plain-seed3"])
        assert (tmp_path / folder).is_dir()
    with pytest.raises(ExperimentError, match="holds runs of duel, not of other"):
        run(name="other")


@pytest.mark.parametrize(("summary", "code"), [("no_such", 1), (None, 0)])
def test_a_summary_that_fails_fails_the_suite_and_there_need_be_none(run, summary, code):
    assert run(summary=summary)[0] == code


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
def test_a_summary_of_what_cannot_be_read_is_one_sentence(tmp_path, capsys, monkeypatch, codes, metrics, problem):
    (tmp_path / "one").mkdir()
    if codes:
        write_suite(tmp_path, **codes)
    if metrics is not None:
        (tmp_path / "one" / "metrics.jsonl").write_text(metrics)

    monkeypatch.setattr(natural, "make", lambda runs, _: [summaries.read_steps(folder, "norm") for folder, _ in runs])
    assert summaries.main([natural.__name__, str(tmp_path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(f"summary: .*{problem}", said)


def test_lines_of_one_step_are_joined(tmp_path):
    lines = [(1, {"norm": 2.0}), (1, {"verdict": "a sentence"}), (2, {"verdict": "another"})]
    write_lines(tmp_path / "metrics.jsonl", ({"step": step, "data": data} for step, data in lines))
    assert summaries.read_steps(tmp_path, "norm") == {1: {"norm": 2.0, "verdict": "a sentence"}}
