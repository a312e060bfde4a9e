# SPDX-License-Identifier: Apache-2.0
"""What the head of an experiment's config says."""

import pytest

from experiments import catalog
from experiments.errors import ExperimentError, UsageError


@pytest.fixture
def configs(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "CONFIGS", tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.yaml").write_text(text)

    return write


def test_a_head_is_read(configs):
    configs("one", "# one: the first\n# reads A_FILE: a file\n# writes OUT: it\n# imports x y\n")
    one = catalog.load("one")
    assert one.summary == "the first" and one.imports == ("x", "y") and not one.is_on_cpu
    assert [(v.name, v.kind, v.meaning) for v in one.variables] == [
        ("A_FILE", "reads", "a file"),
        ("OUT", "writes", "it"),
    ]


def test_an_experiment_needs_what_its_bases_need(configs):
    configs("demo", "# demo: base\n# reads A: a\n# imports x\ndefaults:\n  - ppo_trainer\n")
    configs("child", "# child: more\n# reads B: b\ndefaults:\n  - demo\n  - _self_\n")
    child = catalog.load("child")
    assert [v.name for v in child.variables] == ["A", "B"]
    assert child.imports == ("x",) and child.is_on_cpu


def test_a_head_without_a_summary_is_refused(configs):
    configs("one", "a: 1\n")
    with pytest.raises(ExperimentError, match="# one: what it is"):
        catalog.load("one")


def test_an_unknown_name_is_refused_with_the_known_ones(configs):
    configs("one", "# one: the first\n")
    with pytest.raises(UsageError, match="there are one"):
        catalog.load("two")


@pytest.mark.parametrize(
    "value, problem",
    [
        (None, "is not set"),
        ("", "is not set"),
        ("/no/such", "does not exist"),
        ("./no/such", "does not exist"),
        ("~/no/such/file", "does not exist"),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("hdfs://host/path", None),
    ],
)
def test_a_path_must_exist_and_a_name_is_left_to_transformers(configs, value, problem):
    configs("one", "# one: the first\n# reads PLACE: a folder\n")
    said = catalog.load("one").problem({} if value is None else {"PLACE": value})
    assert said is None if problem is None else problem in said


@pytest.mark.parametrize("value", ["0", "1e-4", "0.5", "1.0e+9"])
def test_a_number_may_be_unset_or_any_from_0_on(configs, value):
    configs("one", "# one: the first\n# number RATE: a rate\n")
    one = catalog.load("one")
    assert one.problem({}) is None and one.problem({"RATE": value}) is None


@pytest.mark.parametrize("value", ["", "fast", "-1", "nan", "inf", "1 2"])
def test_a_number_that_is_none_is_refused_with_what_it_sets(configs, value):
    configs("one", "# one: the first\n# number RATE: a rate\n")
    said = catalog.load("one").problem({"RATE": value})
    assert said.startswith(f"RATE={value} is no number from 0 on: it sets a rate;")


def test_an_experiments_own_line_for_a_variable_stands_in_for_its_bases(configs):
    configs("demo", "# demo: base\n# number RATE: a rate (1)\n")
    configs("child", "# child: more\n# number RATE: a rate (2)\ndefaults:\n  - demo\n")
    assert [v.meaning for v in catalog.load("child").variables] == ["a rate (2)"]
