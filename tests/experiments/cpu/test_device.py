# SPDX-License-Identifier: Apache-2.0
"""The shims that let verl's workers run without a GPU, each against the failure it answers."""

import os
import subprocess
import sys

import pytest

from tests.experiments.conftest import REPO

torch = pytest.importorskip("torch")

CHECKS = """
import os, sys, tempfile
import torch, torch.distributed as dist
import verl
from verl.utils.device import get_torch_device
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.fsdp_utils import CPUOffloadPolicy

device = get_torch_device()
state = device.get_rng_state()
device.manual_seed(3)
first = torch.rand(2)
device.set_rng_state(state)
device.manual_seed(3)
assert torch.equal(first, torch.rand(2))
device.empty_cache()
assert device.memory_allocated() == device.max_memory_reserved() == 0
aggressive_empty_cache(force_sync=True)

with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group(
        backend="cpu:gloo,cpu:nccl", rank=0, world_size=1, init_method=f"file://{store.name}"
    )
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    model = fully_shard(torch.nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=True))
    model(torch.ones(1, 2)).sum().backward()
    wrapped = FullyShardedDataParallel(
        torch.nn.Linear(2, 2), sync_module_states=True, device_id=torch.device("cpu")
    )
    wrapped(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
print("all well")
"""


@pytest.mark.full
@pytest.mark.slow
def test_every_shim_does_its_work_when_verl_loads_the_module(patched_tree, tmp_path):
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(patched_tree), str(REPO)]),
        "VERL_USE_EXTERNAL_MODULES": "lab.experiments.cpu.device",
        "CUDA_VISIBLE_DEVICES": "-1,-1",
    }
    done = subprocess.run([sys.executable, "-c", CHECKS], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "all well" in done.stdout, done.stderr
