# SPDX-License-Identifier: Apache-2.0
"""Every cause has advice, and every config line of it is one that verl takes."""

import json

import pytest
import yaml

from gradloc.report.runs.advice import MORE_PROBES, MORE_STEPS, load, of
from tests.report.builder import SCHEMAS


def causes() -> list[str]:
    schema = json.loads((SCHEMAS / "event.v1.schema.json").read_text())
    cause = schema["$defs"]["Cause"]
    return cause["properties"]["label"]["enum"]


@pytest.mark.parametrize("label", causes())
def test_every_cause_of_the_schema_has_advice(label):
    found = of(label)
    assert label in load()
    assert found.title and found.means.endswith(".")
    assert found.advice
    for what, line in found.advice:
        assert what.endswith(".")
        assert "=" in line and " " not in line


def test_an_unknown_cause_gets_what_is_said_when_nothing_stands_out():
    assert of("from the future") is load()["unknown"]


@pytest.mark.parametrize(
    ("strategy", "advised", "other"), [("bisect", MORE_PROBES, MORE_STEPS), ("auto", MORE_STEPS, MORE_PROBES)]
)
def test_more_of_a_search_is_more_of_what_limits_it(strategy, advised, other):
    found = of("unknown", strategy).advice
    assert advised in found and other not in found


def test_every_config_line_names_a_key_of_the_patched_verl(patched_tree):
    path = patched_tree / "verl" / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for advised in [*(entry.advice for entry in load().values()), [MORE_PROBES]]:
        for _, line in advised:
            node = config
            for part in line.partition("=")[0].split("."):
                assert part in node, f"{line}: verl has no {part}"
                node = node[part]
