# SPDX-License-Identifier: Apache-2.0
"""Whoever is over the threshold is named, and nobody under a tenth of it, in random mixtures of culprits."""

import pytest

from benchmarks.mixtures import LAYOUTS, markdown, measure
from tests.bare.mixtures import mixture, problems


@pytest.mark.parametrize("seed", range(3))
def test_in_one_process(seed):
    assert not problems(mixture(seed))


@pytest.mark.full
def test_on_two_ranks(bare_world):
    told, other = bare_world.run("tests.bare.mixtures.mixture", seed=3, layout="fsdp2")
    assert told == other and not problems(told)


@pytest.mark.slow
def test_in_thirty_mixtures_on_two_ranks():
    rows = measure(30, LAYOUTS)
    print(markdown(rows))
    assert not [(row, problems(row)) for row in rows if problems(row)]
