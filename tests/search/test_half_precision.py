# SPDX-License-Identifier: Apache-2.0
"""bfloat16 weights and computation: every planted token is found, shares add up, the spike is explained."""

import pytest

from tests.bare.scenarios import search_planted

CASES = {
    "single": {(3, 2): 1e4},
    "three": {(3, 2): 1e4, (9, 1): -8e3, (14, 0): 9e3},
    "two that cancel each other": {(5, 1): 3e4, (5, 2): -3e4},
}


def check(found, plants):
    assert found["places"] == sorted(plants)
    assert found["verdict"] == "explained"
    assert 0.8 <= found["closure"] <= 1.25, "the band of half precision"
    assert found["restored"]


@pytest.mark.parametrize("plants", CASES.values(), ids=CASES)
def test_masters_in_half_precision(plants):
    check(search_planted("plain", plants, "bfloat16", masters="bfloat16"), plants)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_masters_in_half_precision_that_are_sharded(bare_world, layout):
    plants = CASES["three"]
    where = {"layout": layout, "plants": plants, "dtype": "bfloat16", "masters": "bfloat16"}
    found, other = bare_world.run("tests.bare.scenarios.search_planted", **where)
    check(found, plants)
    assert found == other
