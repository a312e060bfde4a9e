# SPDX-License-Identifier: Apache-2.0
"""What the default search verifies: each token once, whatever pointed at it."""

import math
from dataclasses import replace

import pytest

from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search import auto
from gradloc.search.candidates import by_coefficient
from gradloc.search.task import Limit, Task
from tests.bare import BareStep, build, random_batch, shard

NUM_MICRO_BATCHES = 4


@pytest.fixture
def search():
    model = shard(build("tiny"), "plain")
    batch = random_batch(model).planted({(3, 2): 1e4, (9, 1): 1e4})
    step, space = BareStep(model, batch, NUM_MICRO_BATCHES), GradientSpace(model)
    step.train()
    norm, tau = space.norm(), 20.0 * batch.num_tokens**0.5
    spike = Spike("fixed", norm, 20.0, tau, batch.num_tokens)
    limit = Limit(NUM_MICRO_BATCHES, math.inf)
    return auto._Search(Task(Prober(step, space, Ranks()), space.take(), 1.0, spike, tau, 8, limit))


def test_a_token_that_the_shares_have_weighed_is_no_hint_as_well(search, monkeypatch):
    shares = search._measure_of(range(NUM_MICRO_BATCHES))
    loudest, second = by_coefficient(search.task, 2, set())
    weighed = replace(loudest, is_weighed=True)
    monkeypatch.setattr(search, "_spans", lambda shares: [weighed])
    found = search._candidates(shares, with_hints=True)
    assert [candidate.tokens for candidate in found] == [loudest.tokens, second.tokens]
    assert search._candidates(shares, with_hints=False) == [weighed]
