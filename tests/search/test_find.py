# SPDX-License-Identifier: Apache-2.0
"""Whoever is over the threshold is named, and nobody under a tenth of it: in mixtures, and in bfloat16 throughout."""

import pytest

from benchmarks.mixtures import LAYOUTS, markdown, measure
from tests.bare.mixtures import mixture, problems
from tests.bare.scenarios import search_planted


@pytest.mark.parametrize("seed", range(3))
def test_mixtures_in_one_process(seed):
    assert not problems(mixture(seed))


@pytest.mark.full
def test_a_mixture_on_two_ranks(bare_world):
    told, other = bare_world.run("tests.bare.mixtures.mixture", seed=3, layout="fsdp2")
    assert told == other and not problems(told)


@pytest.mark.slow
def test_thirty_mixtures_on_two_ranks():
    rows = measure(30, LAYOUTS)
    print(markdown(rows))
    assert not [(row, problems(row)) for row in rows if problems(row)]


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
