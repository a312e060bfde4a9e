# SPDX-License-Identifier: Apache-2.0
"""A language model of transformers in the bare step, tiny: what the benchmarks on a pretrained one rest on."""

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from lab.benchmarks.pretrained import Pretrained, continued
from tests.toy_model import Oracle, ToyStep, shard

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def model(llama):
    return Pretrained(llama)


def test_a_planted_token_is_found_and_its_own_backward_agrees(model):
    batch = continued(model, torch.arange(96), rows=4, length=6, seed=0).planted({(2, 3): 1e4})
    oracle = Oracle(model, batch)
    step, space = ToyStep(shard(model, "plain"), batch, num_micro_batches=2), GradientSpace(model)
    space.clear()
    step.train()
    norm = space.norm()
    assert norm == pytest.approx(float(oracle.gradient().norm()), rel=1e-5)
    found = localize(step, space, Ranks(), Spike("fixed", norm, norm / 10, norm, batch.num_tokens), 1.0)
    assert [batch.place(token, 1, 2) for token in found.tokens] == [(2, 3)]
    assert found.culprits[0].norm == pytest.approx(oracle.norm((2, 3)), rel=1e-4)
