# SPDX-License-Identifier: Apache-2.0
"""The catalog and the configs say the same, and what an experiment needs is asked for."""

import importlib.util
import re

import pytest

from lab.experiments import catalog, environment
from lab.experiments.catalog import Arm, Experiment, Variable
from lab.experiments.errors import UsageError
from tests.experiments.conftest import REPO

# What the script sets itself.
PROVIDED = {
    "GRADLOC_RUN_DIR",
    "GRADLOC_DEMO_MATERIAL",
    "PYTHONPATH",
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_FILE_LOGGER_PATH",
}


def chain(name):
    """The text of an experiment's config and of those it builds on, by name."""
    text = (catalog.CONFIGS / f"{name}.yaml").read_text()
    texts = {name: text}
    for base in re.findall(r"^  - ([\w/-]+)$", text, re.M):
        if (catalog.CONFIGS / f"{base}.yaml").exists():
            texts |= chain(base)
    return texts


FORMS = [form for form in (*catalog.EXPERIMENTS.values(), *catalog.ON_VERL09.values()) if not form.script]


def test_every_config_is_in_the_catalog_and_every_entry_has_its_config():
    assert {form.arguments()[0] for form in FORMS} == {path.stem for path in catalog.CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("experiment", FORMS, ids=lambda form: form.name)
def test_an_entry_has_the_variables_that_its_config_takes(experiment):
    configs = chain(experiment.arguments()[0])
    text = "\n".join(configs.values())
    known = {variable.name: variable.kind for variable in experiment.variables}
    assert set(re.findall(r"\$\{oc\.env:([A-Z_]+)\}", text)) - PROVIDED <= set(known)
    assert set(known) <= set(re.findall(r"oc\.env:([A-Z_]+)", text))
    assert (experiment.own is not None) == bool({catalog.DEMO.name, catalog.ON_VERL09["demo"].name} & set(configs))
    # A number's variable has the experiment's own value behind it.
    for variable, kind in known.items():
        assert kind != "number" or f"oc.env:{variable}," in text


def test_every_variable_of_a_config_is_documented():
    documented = (REPO / "docs" / "experiments.md").read_text()
    for path in catalog.CONFIGS.rglob("*.yaml"):
        for variable in set(re.findall(r"oc\.env:([A-Z_]+)", path.read_text())):
            assert f"`{variable}`" in documented, variable


def test_an_entry_without_a_config_has_a_module_that_is_there():
    scripts = [catalog.load(name).script for name in catalog.EXPERIMENTS if catalog.load(name).script]
    assert scripts and all(importlib.util.find_spec(script) for script in scripts)


def test_arms_have_overrides_that_hydra_takes():
    for arms in (catalog.load(name).arms for name in catalog.EXPERIMENTS):
        assert all("=" in text or text.startswith("~") for arm in arms for text in arm.overrides)


CATALOG = """
[DEFAULT]
hot = temperature=1.5
    top_p=1

[base]
summary = it
reads A = a
number RATE = a rate (1)
imports = x
own = LOOP
material = some.module
arm plain = as it is
arm hot = hotter
    ${hot}
    path=$${run}/x
seeds = 1 2
summary_module = some.summary

[heir]
builds_on = base
number RATE = a rate (2)
writes OUT = it
twin loud = a=1
exploding loud = louder
    b=2

[base-verl09]
form_of = base
arm hot = hot
"""


def test_an_heir_needs_what_its_base_needs_and_has_arms_of_its_own():
    base, heir, _ = catalog.read(CATALOG).values()
    assert base.arms[1] == Arm("hot", "hotter", ("temperature=1.5", "top_p=1", "path=${run}/x"))
    assert [(v.name, v.meaning) for v in heir.variables] == [("A", "a"), ("RATE", "a rate (2)"), ("OUT", "it")]
    assert (heir.imports, heir.own, heir.material) == (("x",), environment.LOOP, "some.module")
    assert (heir.seeds, heir.summary_module, base.seeds) == ((), "", (1, 2))
    exploding, *acting, twin = heir.arms
    assert exploding == Arm("loud", "louder", ("a=1", "b=2")) and twin.overrides == ("a=1",)
    assert [arm.name for arm in acting] == ["loud-mask", "loud-skip", "loud-heal"]


def test_a_form_for_verl_09_is_the_same_but_for_what_it_says():
    base, _, form = catalog.read(CATALOG).values()
    assert (form.verl, form.is_installed, form.own, form.seeds) == ("0.9.1", True, environment.VERL09, base.seeds)
    assert form.arms == (base.arms[0], Arm("hot", "hot"))


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"called 'two': there are buckets-demo, .*two-nodes, wild, wild-long\.$"):
        catalog.load("two")
    with pytest.raises(UsageError, match="write demo verl=0.9.1"):
        catalog.load("demo-verl09")
    monkeypatch.setattr(catalog, "CONFIGS", tmp_path)
    (tmp_path / "two.yaml").touch()
    with pytest.raises(UsageError, match="lab/experiments/catalog.ini lacks it"):
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
def test_a_path_must_exist_and_a_name_is_left_to_transformers(value, problem):
    one = Experiment("one", "the first", (Variable("PLACE", "reads", "a folder"),))
    said = one.problem({} if value is None else {"PLACE": value})
    assert said is None if problem is None else problem in said


@pytest.mark.parametrize("value", [None, "0", "1e-4", "1.0e+9", "", "fast", "-1", "nan", "inf", "1 2"])
def test_a_number_may_be_unset_or_any_from_0_on(value):
    one = Experiment("one", "the first", (Variable("RATE", "number", "a rate"),))
    said = one.problem({} if value is None else {"RATE": value})
    if value in (None, "0", "1e-4", "1.0e+9"):
        assert said is None
    else:
        assert said.startswith(f"RATE={value} is not a number of at least 0: it sets a rate;")


@pytest.mark.parametrize("path", sorted(catalog.CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_names_modules_that_exist(path):
    for names in re.findall(r"pkg://([\w.]+)|\b(lab\.[\w.]+)", path.read_text(encoding="utf-8")):
        place = REPO.joinpath(*"".join(names).rstrip(".").split("."))
        assert any(module.with_suffix(".py").is_file() for module in (place, place.parent)), place
