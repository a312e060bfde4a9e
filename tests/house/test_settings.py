# SPDX-License-Identifier: Apache-2.0
"""The settings of verl 0.9's presets are those that the patch puts into verl 0.7's yaml."""

import importlib
from dataclasses import asdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SEAMS = ROOT / "verl_overrides" / "v0.7.0" / "verl" / "trainer" / "config"
CONF = ROOT / "gradloc" / "adapters" / "verl09" / "conf"
ALGORITHM = ("advantage_reweighting", "lopti")


def added(path: Path) -> str:
    """The lines that a seam adds, as they are in a tree of 0.9, where the package is verl's neighbour."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    return "\n".join(kept).replace("verl.gradloc.", "gradloc.")


def test_they_have_the_same_names_and_defaults():
    found = yaml.safe_load((CONF / "gradloc_defaults.yaml").read_text(encoding="utf-8"))
    actor = dict(found["actor_rollout_ref"]["actor"])
    assert actor.pop("_target_") == "gradloc.adapters.verl09.config.actor_config"
    expected = yaml.safe_load(added(SEAMS / "actor" / "actor.yaml.patch"))
    assert actor == expected
    rollout = dict(found["actor_rollout_ref"]["rollout"])
    assert rollout.pop("_target_") == "gradloc.adapters.verl09.config.GradLocRolloutConfig"
    assert rollout == yaml.safe_load(added(SEAMS / "rollout" / "rollout.yaml.patch"))
    trainer = yaml.safe_load("root:\n" + added(SEAMS / "ppo_trainer.yaml.patch"))["root"]
    assert found["trainer"] == {name: value for name, value in trainer.items() if name not in ALGORITHM}
    assert found["algorithm"] == {name: trainer[name] for name in ALGORITHM}


def blocks(node: dict) -> list[dict]:
    """Every block that names its dataclass, but for the adapter's own, which need verl."""
    inner = [block for value in node.values() if isinstance(value, dict) for block in blocks(value)]
    target = node.get("_target_", "gradloc.adapters")
    return inner if target.startswith("gradloc.adapters") else [node, *inner]


def test_they_are_the_defaults_of_the_dataclasses():
    found = blocks(yaml.safe_load((CONF / "gradloc_defaults.yaml").read_text(encoding="utf-8")))
    assert len(found) == 13
    for block in found:
        module, _, name = block.pop("_target_").rpartition(".")
        made = asdict(getattr(importlib.import_module(module), name)())
        assert made.keys() == block.keys()
        given = {key: value for key, value in block.items() if not (isinstance(value, dict) or "${" in str(value))}
        assert given == {key: made[key] for key in given}, name


def test_a_preset_differs_by_what_it_does():
    presets = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (CONF / "gradloc").glob("*.yaml")
    }
    safe = yaml.safe_load((SEAMS / "gradloc" / "safe.yaml").read_text(encoding="utf-8"))
    assert {key: value for key, value in presets.pop("safe").items() if key != "defaults"} == safe
    modes = {name: preset["actor_rollout_ref"]["actor"]["gradloc"] for name, preset in presets.items()}
    assert modes == {
        name: {"enable": True, "action": {"mode": mode}}
        for name, mode in {"on": "observe", "observe": "observe", "mask": "mask", "skip": "skip"}.items()
    }
