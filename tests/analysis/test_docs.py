# SPDX-License-Identifier: Apache-2.0
"""docs/buckets.md and docs/quartiles.md agree with the code and the yaml that ships on every key, default and file."""

import re
from dataclasses import fields

import pytest
import yaml

from gradloc.analysis.config import BucketSettings, QuartileSettings
from gradloc.rollout_filter.config import FilterSettings
from tests.world import REPO

PAGES = {name: (REPO / "docs" / f"{name}.md").read_text() for name in ("buckets", "quartiles")}
ROW = re.compile(r"^\| `((?:trainer|actor_rollout_ref)\.[\w.]+)` \| `([^`]+)` \|", re.M)
DOCUMENTED = {key: yaml.safe_load(value) for page in PAGES.values() for key, value in ROW.findall(page)}
OURS = re.compile("gradient_analysis|quartile_analysis|rollout_filter|filter_loss_scaling")


def test_every_key_of_the_yaml_is_documented_with_its_default():
    config = yaml.safe_load((REPO / "gradloc" / "conf" / "gradloc_settings" / "all.yaml").read_text())
    worker = config["actor_rollout_ref"]
    blocks = {
        "trainer": config["trainer"],
        "actor_rollout_ref.rollout": worker["rollout"],
        "actor_rollout_ref.actor": worker["actor"],
    }
    shipped = {f"{at}.{key}": value for at, block in blocks.items() for key, value in block.items() if OURS.search(key)}
    assert shipped == DOCUMENTED


@pytest.mark.parametrize("settings", [BucketSettings, QuartileSettings, FilterSettings])
def test_the_codes_own_defaults_are_the_documented_ones(settings):
    for field in fields(settings):
        assert DOCUMENTED[field.metadata["key"]] == field.default, field.name


def test_every_experiment_named_exists():
    named = set(re.findall(r"run_experiment\.sh (buckets-[\w-]+)", PAGES["buckets"]))
    assert named == {"buckets-demo", "buckets-demo-ppo", "buckets-ragen"}
    assert all((REPO / "lab" / "experiments" / f"{name}.yaml").is_file() for name in named)
