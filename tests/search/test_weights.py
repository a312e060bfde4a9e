# SPDX-License-Identifier: Apache-2.0
"""Weights are moved, tokens go where routers sent them before, and all comes back bit for bit."""

from types import SimpleNamespace

import pytest
import torch

from gradloc.core.forward_state import RngState
from gradloc.core.gradients import GradientSpace
from gradloc.core.probe import Prober
from gradloc.core.ranks import LostRank, Ranks
from gradloc.core.step import Outputs, Recorded
from gradloc.search.weights import MovedWeights, forward_on_routes, has_experts, hold_routes


def module(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(512, 512, bias=False).to(dtype)


def test_how_far_the_weights_are_from_where_they_were_is_measured():
    made = torch.nn.Linear(3, 2)
    with MovedWeights(GradientSpace(made), torch.float32) as weights:
        assert weights.distance() == 0.0
        with torch.no_grad():
            made.weight += 2.0
            made.bias -= 1.0
        assert weights.distance() == pytest.approx((6 * 4.0 + 2 * 1.0) ** 0.5)


class Experts(torch.nn.Module):
    """Two scores of three go on; which ones, its weights decide."""

    config = SimpleNamespace(num_experts_per_tok=2)

    def __init__(self, way: str):
        super().__init__()
        self.scale, self.way = torch.nn.Parameter(torch.ones(3)), way

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = inputs * self.scale
        if self.way == "method":
            return scores.topk(2).values
        return torch.topk(input=scores, k=2, dim=0).values if self.way == "names" else torch.topk(scores, 2, 0)[0]


@pytest.mark.parametrize("way", ["method", "names", "places"])
def test_tokens_go_where_the_routers_sent_them_before_the_weights_moved(way):
    model, forwards = Experts(way), []
    assert has_experts(model) and not has_experts(torch.nn.Linear(1, 1))
    inputs = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])]

    class Step:
        num_micro_batches, dtype = 2, torch.float32

        def recorded(self, index: int) -> Recorded:
            return Recorded(RngState(torch.device("cpu")))

        def forward(self, index: int, needs_entropy: bool = False) -> Outputs:
            forwards.append(index)
            return Outputs(model(inputs[index]))

    prober = Prober(Step(), GradientSpace(model), Ranks())
    for _ in range(2):
        hold_routes(prober, [0, 1])
    assert forwards == [0, 1], "each is noted once"
    with torch.no_grad():
        model.scale.copy_(torch.tensor([10.0, 1.0, 1.0]))
    assert forward_on_routes(prober, 0)[0].tolist() == [3.0, 2.0], "not 10 and 3"
    assert forward_on_routes(prober, 1)[0].tolist() == [30.0, 2.0]
    prober.routes.clear()
    assert forward_on_routes(prober, 0)[0].tolist() == [10.0, 3.0]


class Publishing(GradientSpace):
    calls = ""

    def run_local_synced(self, local):
        self.calls += "a"
        return super().run_local_synced(local)

    def reshard(self):
        self.calls += "r"

    def publish(self):
        self.calls += "p"


def test_weights_are_published_where_all_ranks_have_moved_them_and_not_by_one_that_ends():
    space = Publishing(module(torch.float32))
    with MovedWeights(space, torch.float32) as weights:
        weights.move([torch.ones(512, 512)], 1e-3)
        weights.move([torch.ones(512, 512)], 2e-3)
    assert space.calls == "ra" + "arp" + "arp" + "pr", "gathered copies are dropped before each move and at the end"
    space.calls = ""
    with pytest.raises(LostRank), MovedWeights(space, torch.float32):
        raise LostRank
    assert space.calls == "ra", "peers would not join it"


def test_what_has_no_direction_goes_back_and_what_is_another_s_counts_nothing():
    made = torch.nn.Linear(3, 2)
    before = [param.detach().clone() for param in made.parameters()]
    space, ones = GradientSpace(made), torch.ones(2, 3)
    with MovedWeights(space, torch.float32) as weights:
        weights.move([ones, torch.ones(2)], 1.0)
        assert float(weights.move([ones, None], 0.5)) == pytest.approx(3.0)
        assert torch.equal(made.bias, before[1]) and torch.allclose(made.weight, before[0] + 0.5)
        space.counts = [False, True]
        assert float(weights.move([ones, None], 0.5)) == 0.0
