# SPDX-License-Identifier: Apache-2.0
"""What a search costs: 11 f for one culprit, and the shares alone where no few tokens make the spike."""

import pytest
import torch

from gradloc.core.gradients import GradientSpace
from gradloc.core.ranks import Ranks
from gradloc.core.tracker import NormTracker
from gradloc.core.trigger import Spike
from gradloc.search.find import localize
from tests.bare import BareStep, build, random_batch, shard

M = 4
THRESHOLD = 4.0  # healthy norms are near 1


def search(batch):
    """The finding in plain float32, with tracked norms, and its cost in f."""
    step = BareStep(shard(build("tiny"), "plain"), batch, M)
    space, ranks, tracker = GradientSpace(step.model), Ranks(), NormTracker(0)
    tracker.begin_mini_batch()
    step.train(lambda: tracker.after_backward(space))
    spike = Spike("fixed", space.norm(), THRESHOLD, THRESHOLD * batch.num_tokens**0.5, batch.num_tokens)
    found = localize(step, space, ranks, spike, 1.0, tracker.increments(space, ranks, 1.0))
    return found, found.num_forwards + 2 * found.num_backwards - len(found.entropies)


def test_one_culprit_costs_two_forwards_and_three_backwards_of_one_micro_batch():
    found, cost = search(random_batch(build("tiny")).planted({(9, 1): 1e3}))
    assert [len(culprit.tokens) for culprit in found.result.culprits] == [1]
    assert found.certificate.verdict == "explained" and found.certificate.method == "swap"
    assert cost <= 3 + 3 + 6, "two forwards, mostly a third that settles the step; the token alone; the swap"


def test_a_batch_that_is_scaled_as_a_whole_costs_its_shares():
    healthy = random_batch(build("tiny"))
    found, cost = search(healthy.edited(advantages=healthy.advantages * 1e3))
    assert found.status == "not_found" and "the spike is spread" in found.result.stop_reason
    assert cost <= 2 * M + 2


@pytest.mark.parametrize("shape", [(16, 16), (1024, 1024)])
def test_a_rough_norm_is_near_the_norm(shape):
    torch.manual_seed(0)
    module = torch.nn.Linear(*shape, bias=False)
    module.weight.grad = torch.randn(shape)
    space = GradientSpace(module)
    assert float(space.local_squares(is_rough=True)) == pytest.approx(float(space.local_squares()), rel=0.05)
