# SPDX-License-Identifier: Apache-2.0
"""skip_step as arithmetic, against its slow obvious version."""

import json
import math
import random

import pytest

from gradloc.stabilize.config import SkipStepConfig
from gradloc.stabilize.skip_step import SkipStep
from tests.stabilize import slow


def decide(skip, norms):
    return [skip.is_outlier(norm) for norm in norms]


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_skipped_as_the_plain_list_says_also_after_a_resume(seed):
    rng = random.Random(seed)
    norms = [math.exp(rng.gauss(0, 0.2)) * (10 if step >= 200 else 1) for step in range(264)]
    for step, factor in ((3, 100.0), (40, 30.0), (41, 30.0), (90, 1e4), (150, 2.5)):
        norms[step] *= factor
    norms[60], norms[61] = math.nan, math.inf
    settings = SkipStepConfig(enable=True, window=32, num_deviations=4.0)
    decided = decide(SkipStep(settings), norms)
    assert decided == slow.skip_step(norms, window=32, num_deviations=4.0)
    assert decided[40] and decided[90]
    assert not decided[3], "fewer than half a window of norms are known there"
    assert decided[200] and sum(decided[200:]) < 8, "a level that moved for good is accepted after a few steps"
    first, second = SkipStep(settings), SkipStep(settings)
    decide(first, norms[:75])
    second.load_state(json.loads(json.dumps(first.state())))
    assert decide(second, norms[75:]) == decided[75:]
