# SPDX-License-Identifier: Apache-2.0
"""Let verl's FSDP workers run without an accelerator.

verl falls back to the device name "cpu", then calls functions of torch that only an accelerator has. Each function here
prevents one such failure. Load it with `VERL_USE_EXTERNAL_MODULES=lab.experiments.cpu.device`: verl imports it before
its workers. With a GPU present it does nothing.
"""

import functools

import torch
import torch.distributed
import torch.distributed.fsdp


def complete_torch_cpu() -> None:
    """Add to `torch.cpu` the functions that verl expects of every device module; memory counts are 0."""
    counts = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    additions = {
        **dict.fromkeys((*counts, "reset_peak_memory_stats"), lambda *_, **__: 0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda *_: (0, 0),
        "get_device_name": lambda *_: "cpu",
    }
    for name, value in additions.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, value)


def use_gloo() -> None:
    """Replace the backends "cpu:gloo,cpu:nccl" and "cpu:gloo,cpu:gloo" (verl 0.9), which torch refuses, by "gloo"."""
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        if "nccl" in str(backend) or str(backend).count("cpu:") > 1:
            backend = "gloo"
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def allow_sync_of_cpu_modules() -> None:
    """Disable FSDP1's refusal of `sync_module_states` for CPU parameters, which gloo does broadcast."""
    from torch.distributed.fsdp import _init_utils

    # A private name: torch is pinned for it in requirements/demo.txt.
    _init_utils._check_module_states_for_sync_module_states = lambda _states: None


def offload_without_pinning() -> None:
    """Disable offloading to pinned memory, which needs an accelerator."""
    fsdp = torch.distributed.fsdp

    class CPUOffloadPolicy(fsdp.CPUOffloadPolicy):
        def __init__(self, pin_memory: bool = True):
            super().__init__(pin_memory=False)

    class CPUOffload(fsdp.CPUOffload):
        def __init__(self, offload_params: bool = False):
            super().__init__(offload_params=False)

    fsdp.CPUOffloadPolicy = CPUOffloadPolicy
    fsdp.CPUOffload = CPUOffload


def skip_cache_emptying() -> None:
    """Disable the garbage collections around every rollout: 1.2 s per step, and there is no cache to empty."""
    from verl.utils import memory_utils

    memory_utils.aggressive_empty_cache = lambda force_sync=True, max_retries=3: None


if not torch.cuda.is_available():
    complete_torch_cpu()
    use_gloo()
    allow_sync_of_cpu_modules()
    offload_without_pinning()
    skip_cache_emptying()
