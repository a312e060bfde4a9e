# SPDX-License-Identifier: Apache-2.0
"""docs/buckets.md, the yaml that ships and the code agree on every key, default and file name."""

import re
from dataclasses import fields

import pytest
import yaml

from tests.analysis.pure import load
from tests.world import REPO

DOCUMENT = (REPO / "docs" / "buckets.md").read_text()
ROW = re.compile(r"^\| `((?:trainer|actor_rollout_ref)\.[\w.]+)` \| `([^`]+)` \|", re.M)
DOCUMENTED = dict(ROW.findall(DOCUMENT))


def at(config, key):
    for part in key.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("trainer", ["ppo_trainer", "ppo_megatron_trainer"])
def test_documented_defaults_are_those_of_the_yaml(patched_tree, trainer):
    path = patched_tree / "verl" / "trainer" / "config" / f"_generated_{trainer}.yaml"
    config = yaml.safe_load(path.read_text())
    assert DOCUMENTED
    for key, default in DOCUMENTED.items():
        assert at(config, key) == yaml.safe_load(default), key


def test_every_key_of_the_yaml_is_documented(patched_tree):
    path = patched_tree / "verl" / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    config = yaml.safe_load(path.read_text())
    places = {"trainer": config["trainer"], "actor_rollout_ref.rollout": config["actor_rollout_ref"]["rollout"]}
    ours = re.compile("gradient_analysis|rollout_filter")
    keys = {f"{place}.{key}" for place, part in places.items() for key in part if ours.search(key)}
    assert keys | {"actor_rollout_ref.actor.filter_loss_scaling"} == set(DOCUMENTED)


def test_the_codes_own_defaults_are_the_documented_ones():
    for field in fields(load("config", "rollout_filter").FilterSettings):
        key = f"actor_rollout_ref.rollout.rollout_filter_{field.name}"
        key = "actor_rollout_ref.actor.filter_loss_scaling" if field.name == "loss_scaling" else key
        assert yaml.safe_load(DOCUMENTED[key]) == field.default, key
    defaults = load("config").BucketSettings()
    assert yaml.safe_load(DOCUMENTED["trainer.gradient_analysis_every"]) == defaults.every
    rollout = "actor_rollout_ref.rollout.gradient_analysis"
    assert yaml.safe_load(DOCUMENTED[f"{rollout}_num_buckets"]) == defaults.num_buckets
    assert DOCUMENTED[f"{rollout}_bucket_mode"] == defaults.bucket_mode


def test_every_experiment_named_exists():
    named = set(re.findall(r"run_experiment\.sh (buckets-[\w-]+)", DOCUMENT))
    assert named == {"buckets-demo", "buckets-demo-ppo", "buckets-ragen"}
    assert all((REPO / "experiments" / f"{name}.yaml").is_file() for name in named)
