# SPDX-License-Identifier: Apache-2.0
"""docs/quartiles.md, the yaml that ships and the code agree on every key, default and metric."""

from dataclasses import fields

import pytest
import yaml

from tests.analysis.pure import load
from tests.analysis.test_docs import ROW, at
from tests.world import REPO

DOCUMENT = (REPO / "docs" / "quartiles.md").read_text()
DOCUMENTED = dict(ROW.findall(DOCUMENT))


@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
def test_documented_defaults_are_those_of_the_yaml_and_none_is_left_out(patched_tree, trainer):
    path = patched_tree / "verl" / "trainer" / "config" / f"_generated_{trainer}.yaml"
    config = yaml.safe_load(path.read_text())
    ours = {f"trainer.{key}" for key in config["trainer"] if key.startswith("quartile_analysis")}
    assert ours == set(DOCUMENTED)
    for key, default in DOCUMENTED.items():
        assert at(config, key) == yaml.safe_load(default), key


def test_the_codes_own_defaults_are_the_documented_ones():
    for field in fields(load("config").QuartileSettings):
        documented = DOCUMENTED[f"trainer.quartile_analysis_{field.name}"]
        assert yaml.safe_load(documented) == field.default, field.name


def test_every_split_is_documented():
    for split in load("split", "analysis.quartiles").SPLITS:
        assert f"`{split}`" in DOCUMENT
