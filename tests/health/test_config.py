# SPDX-License-Identifier: Apache-2.0
"""Every setting of trainer.health: one default, and one sentence when wrong."""

import json
from dataclasses import asdict

import pytest

from gradloc.explain.advice import actions_of
from gradloc.health.config import HealthConfig
from gradloc.health.rules import ADVICE

LINES = sorted({line for names in ADVICE.values() for _, line in actions_of(names, "verl 0.7.0")})
ASKED = {
    "default": ("ppo_trainer", []),
    "megatron": ("ppo_megatron_trainer", []),
    "on": ("ppo_trainer", ["trainer.health.enable=true", "trainer.health.policy_kl=[0.5,null]"]),
    "wrong": ("ppo_trainer", ["trainer.health.recent=0"]),
    "advised": ("ppo_trainer", [part for line in LINES for part in line.split()]),
    "no such key": ("ppo_trainer", ["trainer.no_such=1"]),
}


@pytest.fixture(scope="module")
def composed(single):
    """verl's configs with each of the overrides above."""
    read = "tests.world.configs.health"
    asked = {key: {"name": name, "cases": [overrides], "read": read} for key, (name, overrides) in ASKED.items()}
    return {key: single.run("configs.read_all", **case)[0][0] for key, case in asked.items()}


def plain(config):
    """As JSON has it."""
    return json.loads(json.dumps(asdict(config)))


def test_both_yamls_and_the_dataclass_say_the_same_and_are_off_until_the_key_is_set(composed):
    for name in ("default", "megatron"):
        assert composed[name] == {"yaml": plain(HealthConfig()), "on": False}
    assert composed["on"]["on"] and composed["on"]["yaml"]["policy_kl"] == [0.5, None]
    assert composed["wrong"]["error"] == "trainer.health.recent must be an integer of at least 1, found 0.", "off, too"


def test_every_override_that_is_advised_is_one_that_verl_takes(composed):
    assert set(ADVICE) == set(HealthConfig.rule_names())
    assert "error" not in composed["advised"], composed["advised"]
    assert "trainer.no_such" in composed["no such key"]["error"]  # it would have been named


WRONG = [
    ({"warmup": 200}, "trainer.health.warmup must be at most trainer.health.window=100, which is all that is remembered, found 200."),  # noqa: E501
    ({"recent": True}, "trainer.health.recent must be an integer of at least 1, found True."),
    ({"aborted": 0.1}, "trainer.health.aborted must be null (off) or [warning, danger], each null or a number from 0 on, found 0.1."),  # noqa: E501
    ({"aborted": [float("nan"), None]}, "trainer.health.aborted must be null (off) or [warning, danger], each null or a number from 0 on, found [nan, None]."),  # noqa: E501
    ({"policy_kl": [2, 1]}, "trainer.health.policy_kl must be [warning, danger] in order, found [2, 1]."),  # noqa: E501
    ({"entropy_fall": [0.1, 0.2]}, "trainer.health.entropy_fall must be [warning, danger] with danger not above warning, found [0.1, 0.2]."),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(ValueError) as caught:
        HealthConfig(**given)
    assert str(caught.value) == sentence
    with pytest.raises(ValueError, match="unknown setting trainer.health.entropy: did you mean trainer.health.entr"):
        HealthConfig(**{"entropy": 1})
    assert HealthConfig(aborted=(None, None)).aborted is None, "a pair of nulls is off"
