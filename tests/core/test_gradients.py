# SPDX-License-Identifier: Apache-2.0
"""What torch wraps around a model, on one process: DDP changes neither its names nor what a failed pass leaves; shards
that FSDP2's offload_policy keeps on the host are worked on there, and reduced on the device."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

from gradloc.core.gradients import GradientSpace
from gradloc.core.sharding import abandon_pass, local_shard, unwrapped
from gradloc.search.weights import MovedWeights


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


@pytest.fixture
def offloaded(tmp_path, monkeypatch):
    """A weight whose shard lies on the host and whose mesh is of another device: "meta", which computes nothing."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    waited: list[torch.device] = []
    device = SimpleNamespace(current_device=lambda: 3, synchronize=lambda *of: waited.append(of))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    shard = torch.arange(1.0, 5.0)
    meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
    spec = DTensorSpec(DeviceMesh("meta", [0]), (Shard(0),), tensor_meta=meta)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(DTensor(shard, spec, requires_grad=False))
    yield module, waited
    dist.destroy_process_group()


def test_the_device_of_an_offloaded_model_is_where_its_forwards_run(offloaded):
    space = GradientSpace(offloaded[0])
    assert (space.device, space.params[0].device) == (torch.device("meta:3"), torch.device("cpu"))
    assert space.is_offloaded and not GradientSpace(torch.nn.Linear(2, 2)).is_offloaded


def test_sums_over_ranks_are_taken_on_the_device(offloaded, monkeypatch):
    module, _ = offloaded
    space, reduced = GradientSpace(module), []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: reduced.append(values.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # which has nothing to read back
        space.weight_square_and_count()
    assert reduced == ["meta"]


def test_weights_on_the_host_move_there_once_no_copy_of_them_is_on_its_way(offloaded):
    module, waited = offloaded
    space = GradientSpace(module)
    before, shard = local_shard(module.weight).clone(), local_shard(module.weight)
    with MovedWeights(space, torch.float32) as weights:
        assert len(waited) == 1
        weights.move([torch.ones(4)], 0.5)
        assert torch.equal(shard, before + 0.5) and len(waited) == 2
    assert torch.equal(shard, before) and len(waited) == 3
