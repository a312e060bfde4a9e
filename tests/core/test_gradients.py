# SPDX-License-Identifier: Apache-2.0
"""A gradient is one vector whatever torch wraps around the model, wherever its shards lie and in whatever it is summed.

On one process: DDP, FSDP2's precision, and shards that its offload_policy keeps on the host.
"""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

from gradloc.core.gradients import GradientSpace, squared_norms
from gradloc.core.sharding import abandon_pass, gradient_dtypes, local_shard
from gradloc.search.weights import MovedWeights


@pytest.fixture
def group(tmp_path):
    """This process is a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    time.sleep(0.1)  # gloo's thread takes the GIL to let go of the last reduction; the group's end would wait for it
    dist.destroy_process_group()


@pytest.fixture
def ddp(group):
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)))


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
def offloaded(group, monkeypatch):
    """A weight whose shard lies on the host and whose mesh is of another device: "meta", which computes nothing."""
    waited: list[torch.device] = []
    device = SimpleNamespace(current_device=lambda: 3, synchronize=lambda *of: waited.append(of))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    shard = torch.arange(1.0, 5.0)
    meta = TensorMeta(shard.shape, shard.stride(), shard.dtype)
    spec = DTensorSpec(DeviceMesh("meta", [0]), (Shard(0),), tensor_meta=meta)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(DTensor(shard, spec, requires_grad=False))
    return module, waited


def test_the_device_of_an_offloaded_model_is_where_its_forwards_run(offloaded):
    space = GradientSpace(offloaded[0])
    assert (space.device, space.params[0].device) == (torch.device("meta:3"), torch.device("cpu"))
    assert space.is_offloaded and not GradientSpace(torch.nn.Linear(2, 2)).is_offloaded


def test_a_model_that_is_sharded_in_part_is_refused(offloaded):
    offloaded[0].bias = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="found a mixture of layouts"):
        GradientSpace(offloaded[0])


FINE, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("policies", "dtype"),
    [
        ([], None),
        ([MixedPrecisionPolicy()], FINE),
        ([MixedPrecisionPolicy(HALF)], HALF),
        ([MixedPrecisionPolicy(HALF, FINE)], FINE),
        ([MixedPrecisionPolicy(HALF, FINE), MixedPrecisionPolicy(HALF, HALF)], HALF),
    ],
)
def test_fsdp2_sums_in_the_coarsest_format_that_a_unit_reduces_in(group, policies, dtype):
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in policies))
    for layer, policy in zip(module, policies, strict=True):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    assert gradient_dtypes(module) == (dtype, dtype)


def test_sums_over_ranks_are_taken_on_the_device(offloaded, monkeypatch):
    module, _ = offloaded
    space, reduced = GradientSpace(module), []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: reduced.append(values.device.type))
    with pytest.raises(NotImplementedError, match="meta"):  # which has nothing to read back
        space.norm()
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


@pytest.mark.parametrize(
    ("summed", "reduced", "once", "error"),
    [
        (torch.float32, torch.float32, True, 0.0),
        (torch.float32, torch.bfloat16, False, 2**-8 * 2**0.5),
        (torch.float32, torch.bfloat16, True, 2**-8 * 5**0.5),
        (torch.bfloat16, torch.float32, True, 2**-8 * 5**0.5),
        (torch.bfloat16, torch.float32, False, 0.0),
        (torch.float16, torch.bfloat16, True, 2**-8 * 5**0.5),
        (None, None, True, 0.0),
    ],
)
def test_a_reduction_in_half_precision_rounds_once_a_rank_and_a_micro_batch_that_is_summed(
    summed, reduced, once, error
):
    space = GradientSpace(torch.nn.Linear(2, 2))
    space._summed_in, space._reduced_in = summed, reduced
    assert space.reduction_error(4, once) == pytest.approx(error)


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("count", [1, 4096, 5000])
def test_a_norm_is_right_whatever_its_size_and_length(size, count):
    values = torch.linspace(-1, 1, count) * size if count > 1 else torch.full((1,), size)
    wanted = float(values.double().square().sum())
    for are_weights in (False, True):
        (found,) = squared_norms([values], are_weights).tolist()
        assert found == pytest.approx(wanted, rel=1e-14 if are_weights else 1e-6)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_plain_models_gradients_are_added_kept_and_put_back(on_host):
    module = torch.nn.Linear(3, 2)
    space = GradientSpace(module)
    ones = [torch.ones(2, 3), None]
    space.add(ones, alpha=2.0)
    assert torch.equal(module.weight.grad, 2 * ones[0]) and module.bias.grad is None
    assert space.local_squares().tolist() == pytest.approx([24.0, 0.0]) and space.norm() == pytest.approx(24**0.5)
    assert space.current()[0] is module.weight.grad and space.current()[1] is None
    space.scale_each([0.5, 3.0])
    assert torch.equal(module.weight.grad, ones[0])
    space.scale_each([2.0, 3.0])
    space.keeps_on_host = on_host
    kept = space.keep()
    assert module.weight.grad is None and space.norm(kept) == pytest.approx(24**0.5)
    space.add(kept, alpha=2.0)
    assert space.norm() == pytest.approx(2 * 24**0.5)
    assert float(space.dots(space.current(), kept).sum()) == pytest.approx(2 * 24.0)
    space.put(kept)
    assert module.weight.grad is kept[0] and module.bias.grad is None and not space.is_offloaded
    assert space.are_summed


def test_a_shard_that_was_kept_on_the_host_comes_back_as_the_engine_s_own(group):
    module = fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 3)).sum().backward()
    space, before = GradientSpace(module), [param.grad for param in module.parameters()]
    space.keeps_on_host = True
    space.put(space.keep())
    assert all(isinstance(param.grad, DTensor) for param in module.parameters())
    assert all(map(torch.equal, map(local_shard, space.current()), map(local_shard, before)))


def test_an_inner_product_of_half_precision_is_summed_in_a_finer_one():
    model = torch.nn.Linear(300, 40, dtype=torch.bfloat16)
    space = GradientSpace(model)
    generator = torch.Generator().manual_seed(0)
    kept = [torch.randn(param.shape, generator=generator).bfloat16() for param in model.parameters()]
    for param, other in zip(model.parameters(), kept, strict=True):
        param.grad = other + torch.randn(param.shape, generator=generator).bfloat16()
    dots = space.dots(space.current(), kept)
    wanted = [float((p.grad.double() * k.double()).sum()) for p, k in zip(model.parameters(), kept, strict=True)]
    assert dots.tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_part_that_another_process_has_as_well_counts_nothing():
    module = torch.nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()  # a gradient of ones
    space = GradientSpace(module)
    space.counts = [True, False]
    for squares in (space.squares(), space.dots(space.current(), space.current())):
        assert squares.tolist() == [pytest.approx(6.0), 0.0]
    assert float(space.local_squares()[1]) == 0.0
