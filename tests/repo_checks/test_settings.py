# SPDX-License-Identifier: Apache-2.0
"""The settings that Hydra reads are those of the dataclasses, and a preset differs by what it does."""

import re
from pathlib import Path

import pytest
import yaml

from gradloc.config import PUBLISHED
from gradloc.health.config import HealthConfig
from gradloc.reweighting import AdvantageReweightingConfig, LoptiConfig
from gradloc.stabilize.config import LayerClipConfig, SeqClipConfig, SkipStepConfig, TokenClipConfig
from scripts import make_settings

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "gradloc" / "conf"


@pytest.mark.parametrize("made", [make_settings.hydra_files, make_settings.pages])
def test_hydras_files_and_the_docs_tables_are_what_their_script_makes(made):
    for path, text in made().items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/make_settings.py"


def test_every_table_of_settings_is_in_the_docs_once():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    names = re.findall(r"^<!-- made by python scripts/make_settings.py (.+) -->$", text, re.M)
    assert sorted(names) == sorted(make_settings.tables())


def test_the_patch_of_verls_actor_adds_the_published_keys():
    patch = next((ROOT / "verl_overrides").rglob("actor.yaml.patch")).read_text(encoding="utf-8")
    added = yaml.safe_load("\n".join(line[1:] for line in patch.splitlines() if re.match(r"\+(?!\+)", line)))
    assert added == dict.fromkeys(PUBLISHED)


EDGES = [
    (LayerClipConfig, {"warmup": 2}, {"warmup": 1}),
    (LayerClipConfig, {"window": 8}, {"window": 7}),
    (LayerClipConfig, {"relative_factor": 1}, {"relative_factor": 0.99}),
    (LayerClipConfig, {"beta": 0}, {"beta": -0.01}),
    (LayerClipConfig, {"beta": 0.99}, {"beta": 1}),
    (LayerClipConfig, {"num_deviations": 1e-9}, {"num_deviations": 0}),
    (SkipStepConfig, {"window": 4}, {"window": 3}),
    (SkipStepConfig, {"num_deviations": 1e-9}, {"num_deviations": 0}),
    (TokenClipConfig, {"upper": 1}, {"upper": 0.99}),
    (TokenClipConfig, {"lower": 1}, {"lower": 1.01}),
    (SeqClipConfig, {"lower": 1e-9}, {"lower": 0}),
    (TokenClipConfig, {"upper": None}, {"upper": None, "mode": "mask"}),
    (SeqClipConfig, {"upper": None, "lower": 0.5, "mode": "clamp"}, {"upper": None, "lower": None, "mode": "clamp"}),
    (AdvantageReweightingConfig, {"alpha": 1}, {"alpha": 1.01}),
    (AdvantageReweightingConfig, {"alpha": 0}, {"alpha": -0.01}),
    (LoptiConfig, {"eta": 0.99}, {"eta": 1}),
    (LoptiConfig, {"eta": -0.99}, {"eta": -1}),
    (LoptiConfig, {"eta": 0, "quantile": 0.5}, {"eta": 0}),
    (LoptiConfig, {"quantile": 0.01}, {"quantile": 0}),
    (LoptiConfig, {"quantile": 0.99}, {"quantile": 1}),
    (HealthConfig, {"warmup": 2}, {"warmup": 1}),
    (HealthConfig, {"window": 8, "warmup": 8}, {"window": 7, "warmup": 7}),
    (HealthConfig, {"window": 20, "warmup": 20}, {"window": 20, "warmup": 21}),
    (HealthConfig, {"recent": 1}, {"recent": 0}),
    (HealthConfig, {"clip_window": 1}, {"clip_window": 0}),
    (HealthConfig, {"deviations": 1e-9}, {"deviations": 0}),
    (HealthConfig, {"spikes": [0, None]}, {"spikes": [-1e-9, None]}),
    (HealthConfig, {"truncation": [0.5, 0.5]}, {"truncation": [0.5, 0.49]}),
    (HealthConfig, {"length_fall": [0.5, 0.5]}, {"length_fall": [0.5, 0.51]}),
]


@pytest.mark.parametrize(("settings", "allowed", "refused"), EDGES)
def test_the_last_value_that_is_allowed_and_the_first_that_is_refused(settings, allowed, refused):
    made = settings(**allowed)
    for name, value in allowed.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)
    with pytest.raises(ValueError, match="must be"):
        settings(**refused)


def test_a_preset_differs_by_what_it_does():
    presets = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (CONF / "gradloc").glob("*.yaml")
    }
    safe = presets.pop("safe")["actor_rollout_ref"]
    assert (safe["actor"]["gradloc"]["enable"], safe["rollout"]) == (True, {"calculate_log_probs": True})
    assert presets.pop("off") == {"defaults": ["/gradloc_defaults"]}
    modes = {name: preset["actor_rollout_ref"]["actor"]["gradloc"] for name, preset in presets.items()}
    assert modes == {
        name: {"enable": True, "action": {"mode": mode}}
        for name, mode in {
            "on": "observe",
            "observe": "observe",
            "mask": "mask",
            "heal": "heal",
            "skip": "skip",
        }.items()
    }
