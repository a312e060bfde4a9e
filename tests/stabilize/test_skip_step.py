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
def test_steps_are_skipped_as_the_plain_list_says(seed):
    rng = random.Random(seed)
    norms = [math.exp(rng.gauss(0, 0.2)) for _ in range(200)]
    for step, factor in ((3, 100.0), (40, 30.0), (41, 30.0), (90, 1e4), (150, 2.5)):
        norms[step] *= factor
    norms[60], norms[61] = math.nan, math.inf
    settings = SkipStepConfig(enable=True, window=32, num_deviations=4.0)
    decided = decide(SkipStep(settings), norms)
    assert decided == slow.skip_step(norms, window=32, num_deviations=4.0)
    assert decided[40] and decided[90]
    assert not decided[3], "fewer than half a window of norms are known there"


def test_a_level_that_moved_for_good_is_accepted_after_a_few_skipped_steps():
    rng = random.Random(1)
    level = [1.0] * 64 + [10.0] * 64
    norms = [value * math.exp(rng.gauss(0, 0.1)) for value in level]
    decided = decide(SkipStep(SkipStepConfig(enable=True)), norms)
    assert decided[64]
    assert sum(decided) < 8


def test_what_is_not_finite_is_left_to_verl_and_not_remembered():
    skip = SkipStep(SkipStepConfig(enable=True, window=8))
    decide(skip, [1.0, 1.1, 0.9, 1.0])
    before = skip.state()
    assert decide(skip, [math.nan, math.inf]) == [False, False]
    assert skip.state() == before


def test_the_skip_rules_norms_go_through_json_bit_by_bit():
    rng = random.Random(2)
    norms = [math.exp(rng.gauss(0, 0.5)) for _ in range(60)]
    settings = SkipStepConfig(enable=True, window=16, num_deviations=1.5)
    whole, first, second = SkipStep(settings), SkipStep(settings), SkipStep(settings)
    decided = decide(whole, norms)
    decide(first, norms[:25])
    second.load_state(json.loads(json.dumps(first.state())))
    assert decide(second, norms[25:]) == decided[25:]
    assert second.threshold() == whole.threshold()
