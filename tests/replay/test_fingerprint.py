# SPDX-License-Identifier: Apache-2.0
"""The fingerprint knows the same weights under every sharding, and tells others apart."""

import copy
import json

import pytest

from gradloc.loop import fingerprint
from gradloc.record import Fingerprint
from gradloc.record.reading import read


def differs(*prints):
    return fingerprint.differs(*(read(Fingerprint, raw) for raw in prints))


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp1", "fsdp1, original parameters"])
def test_sharding_does_not_change_it(prints, sharding):
    assert differs(prints["plain"], prints[sharding]) is None
    assert differs(prints[sharding], prints["plain"]) is None
    assert (prints[sharding]["parameters"] is None) == (sharding == "fsdp1")


@pytest.mark.parametrize("known", ["fsdp2", "fsdp1"])
def test_other_weights_one_step_and_half_precision_are_told_apart(prints, known):
    assert "rounding to bfloat16" in differs(prints[known], prints["half"])
    assert differs(prints[known], prints["one step on"]) is not None
    other = differs(prints[known], prints["other"])
    assert other is not None and "rounding" not in other


def test_it_survives_json_and_numbers_that_json_does_not_have(prints):
    again = json.loads(json.dumps(prints["plain"]))
    assert differs(prints["plain"], again) is None
    broken = copy.deepcopy(again)
    broken["parameters"]["model.norm.weight"][1:] = ["NaN", "Infinity"]
    assert "model.norm.weight" in differs(again, broken)
    assert differs(broken, copy.deepcopy(broken)) is None
