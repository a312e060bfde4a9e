# SPDX-License-Identifier: Apache-2.0
"""What torch wraps around a model changes neither its names nor what a failed pass leaves: DDP, on one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradloc.core.gradients import GradientSpace
from gradloc.core.sharding import abandon_pass, unwrapped


@pytest.fixture
def ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    yield DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))
    dist.destroy_process_group()


def test_its_parameters_have_the_models_own_names(ddp):
    space = GradientSpace(ddp)
    assert space.names == ["0.weight", "0.bias", "1.weight", "1.bias"] and space.module is ddp
    assert unwrapped(ddp) is ddp.module and unwrapped(ddp.module) is ddp.module


def test_after_a_pass_that_was_cut_off_the_next_gives_its_gradient_bit_for_bit(ddp):
    inputs = torch.randn(5, 3)

    def gradient():
        ddp.zero_grad()
        ddp(inputs).sum().backward()
        return [param.grad.clone() for param in ddp.parameters()]

    expected = gradient()
    ddp(inputs)  # its backward never comes
    abandon_pass(ddp)
    assert all(param.grad is None for param in ddp.parameters())
    assert all(map(torch.equal, gradient(), expected))
