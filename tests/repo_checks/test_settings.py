# SPDX-License-Identifier: Apache-2.0
"""The settings that Hydra reads are those of the dataclasses, and a preset differs by what it does."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from gradloc.config import PUBLISHED
from gradloc.health.config import HealthConfig
from gradloc.reweighting import LoptiConfig
from gradloc.stabilize.config import SeqClipConfig, TokenClipConfig
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


def every_setting(kind, prefix=""):
    """Yield each setting's name and bound, those of nested blocks too."""
    for each in fields(kind):
        if is_dataclass(each.default_factory):
            yield from every_setting(each.default_factory, f"{prefix}{each.name}.")
        elif "allowed" in each.metadata:
            yield f"{prefix}{each.name}", each.metadata["allowed"]


SETTINGS = {
    f"{kind.__name__}.{name}": allowed
    for kind in (*make_settings.BLOCKS.values(), *make_settings.SINGLE)
    for name, allowed in every_setting(kind)
}
BOUNDS = [
    (r"(?:at least|from|in \[) ?(-?\d+)", True, -1),
    (r"(?:greater than|above|between|in \() ?(-?\d+)", False, 1),
    (r"(?:at most|to|, (?=\d+\])) ?(\d+)", True, 1),
    (r"(?:and|, (?=\d+\))) ?(\d+)(?:, exclusive|\))", False, -1),
]
"""How a sentence says a bound, whether that number is allowed, and which way the first one lies that is not (or is)."""


def edges(expected: str) -> tuple[list, list]:
    """Return the last values that a bound's sentence allows, and the first ones that it does not."""
    text = expected.partition(", with")[0].replace("positive number", "number above 0")
    step = 1 if "integer" in text or "global step" in text else 1e-9
    allowed, refused = ([None], []) if text.startswith("null") else ([], [None])
    for pattern, is_allowed, way in BOUNDS:
        for found in map(int, re.findall(pattern, text)):
            (allowed if is_allowed else refused).append(found)
            (refused if is_allowed else allowed).append(found + way * step)
    words = re.findall("one of (.*)", text)
    allowed += words[0].split(", ") if words else [True, False] if "true or false" in text else []
    return allowed, [*refused, 5 if "path" in text or "command" in text else "no such word"]


def test_a_setting_s_bound_is_the_one_that_the_docs_say():
    assert edges("a number above 0 and at most 1") == ([1e-9, 1], [None, 0, 1 + 1e-9, "no such word"])
    for name, bound in SETTINGS.items():
        allowed, refused = edges(bound.expected)
        assert allowed or "path" in bound.expected, f"{name}: how does it say {bound.expected}?"
        assert [value for value in allowed if not bound.holds(value)] == [], name
        assert [value for value in refused if bound.holds(value)] == [], name


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        (TokenClipConfig, {"upper": None}, {"upper": None, "mode": "mask"}),
        (SeqClipConfig, {"upper": None, "lower": 0.5, "mode": "clamp"}, {"upper": None, "mode": "clamp"}),
        (LoptiConfig, {"eta": 0, "quantile": 0.5}, {"eta": 0}),
        (HealthConfig, {"window": 20, "warmup": 20}, {"window": 20, "warmup": 21}),
        (HealthConfig, {"spikes": [0, None]}, {"spikes": [-1e-9, None]}),
        (HealthConfig, {"truncation": [0.5, 0.5]}, {"truncation": [0.5, 0.49]}),
        (HealthConfig, {"length_fall": [0.5, 0.5]}, {"length_fall": [0.5, 0.51]}),
    ],
)
def test_settings_that_bound_each_other_are_held_together(settings, allowed, refused):
    settings(**allowed)
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
    names = {"on": "observe"} | {name: name for name in ("observe", "mask", "heal", "skip")}
    assert modes == {name: {"enable": True, "action": {"mode": mode}} for name, mode in names.items()}
