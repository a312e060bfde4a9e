# SPDX-License-Identifier: Apache-2.0
"""Experiments with arms: what the head says, what is run in which order, and how it ends."""

import json
import sys
from pathlib import Path

import pytest

from experiments import catalog, launch, suite
from experiments.errors import ExperimentError, UsageError

HEAD = """\
# duel: two ways of one thing
# arm plain: the config as it is
# arm loud: two values replaced
#     a.b=1 'c=[x, y]'
#     ~d
# seeds 3 4
# summary tests.experiments.suite_summary
"""


@pytest.fixture
def duel(tmp_path, monkeypatch):
    """Writes a config called duel and reads its head."""
    configs = tmp_path / "configs"
    configs.mkdir()
    monkeypatch.setattr(catalog, "CONFIGS", configs)

    def made(text=HEAD):
        (configs / "duel.yaml").write_text(text)
        return catalog.load("duel")

    return made


def test_arms_seeds_and_summary_are_read_from_the_head(duel):
    experiment = duel()
    assert [(arm.name, arm.meaning, arm.overrides) for arm in experiment.arms] == [
        ("plain", "the config as it is", ()),
        ("loud", "two values replaced", ("a.b=1", "c=[x, y]", "~d")),
    ]
    assert experiment.seeds == (3, 4)
    assert experiment.summary_module == "tests.experiments.suite_summary"


def test_an_experiment_has_arms_of_its_own_only_and_the_material_of_its_base(duel):
    (catalog.CONFIGS / "demo.yaml").write_text("# demo: base\n# material some.module\n")
    duel("# duel: more\n# arm plain: as it is\ndefaults:\n  - demo\n")
    (catalog.CONFIGS / "heir.yaml").write_text("# heir: more\ndefaults:\n  - duel\n")
    heir = catalog.load("heir")
    assert heir.arms == () and heir.material == "some.module" and heir.is_on_cpu


@pytest.mark.parametrize(
    "line, problem",
    [("#     not-an-override", "is no override"), ("# arm plain: again", "two arms are called")],
)
def test_a_head_that_makes_no_sense_is_refused(duel, line, problem):
    with pytest.raises(ExperimentError, match=problem):
        duel(f"# duel: it\n# arm plain: as it is\n{line}\n")


def test_every_arm_runs_with_every_seed_arm_by_arm(duel):
    cells = suite.plan(duel(), None, None, [])
    assert [cell.folder for cell in cells] == [
        "plain-seed3",
        "plain-seed4",
        "loud-seed3",
        "loud-seed4",
    ]


def test_a_part_can_be_chosen(duel):
    cells = suite.plan(duel(), "loud", "7", ["a.b=2"])
    assert [cell.folder for cell in cells] == ["loud-seed7"]
    # The user's override comes last and so wins.
    assert cells[0].overrides(["a.b=2"]) == ["a.b=1", "c=[x, y]", "~d", "seed=7", "a.b=2"]


def test_without_seeds_a_folder_is_called_like_its_arm(duel):
    experiment = duel(HEAD.replace("# seeds 3 4\n", ""))
    cells = suite.plan(experiment, None, None, ["seed=5"])
    assert [cell.folder for cell in cells] == ["plain", "loud"]
    assert cells[0].overrides(["seed=5"]) == ["seed=5"]


@pytest.mark.parametrize(
    "arms, seeds, given, problem",
    [
        ("other", None, [], "has no arm 'other': there are plain, loud"),
        ("plain,", None, [], "has no arm ''"),
        (None, "one", [], "--seeds one is no list of whole numbers"),
        (None, "", [], "is no list of whole numbers"),
        (None, None, ["seed=3"], "write --seeds N instead of seed=N"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(duel, arms, seeds, given, problem):
    with pytest.raises(UsageError, match=problem):
        suite.plan(duel(), arms, seeds, given)


@pytest.mark.parametrize("arms, seeds, option", [("a", None, "--arms"), (None, "1", "--seeds")])
def test_one_run_has_no_arms_to_choose_from(duel, arms, seeds, option):
    with pytest.raises(UsageError, match=f"leave {option} out"):
        suite.plan(duel("# duel: it\n"), arms, seeds, [])


@pytest.fixture
def stage(duel, tmp_path, monkeypatch):
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

    def run(code, summary="# summary told\n"):
        experiment = duel(HEAD.replace("# summary tests.experiments.suite_summary\n", summary))

        def run_one(overrides, into):
            into.mkdir()
            command = [sys.executable, "-c", code, *overrides]
            return launch.run(command, into / "console.log", is_brief=True)

        cells = suite.plan(experiment, None, None, [])
        return suite.run(experiment, cells, [], folder, run_one, sys.executable), folder

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


def test_a_summary_that_fails_fails_the_suite(stage):
    assert stage("pass", "# summary no_such\n")[0] == 1


def test_a_suite_without_a_summary_ends_with_its_runs(stage):
    assert stage("pass", "")[0] == 0


def test_a_folder_that_is_no_suite_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="name the results folder"):
        suite.read(tmp_path)
    (tmp_path / "suite.json").write_text('{"cells": [')
    with pytest.raises(ExperimentError, match="cut off"):
        suite.read(tmp_path)
