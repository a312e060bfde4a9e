# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Whether a search fits into memory; asked on all ranks before one begins."""

import torch

from .gradients import GradientSpace, local_shard

__all__ = ["NotEnoughMemory", "check_memory", "free_bytes"]

_NUM_COPIES = 3  # of this rank's shards: the gradient set aside, the probe's own, and the weights or a residual


class NotEnoughMemory(RuntimeError):
    """A search would not fit; carries what it needs and what there is, in bytes."""


def check_memory(space: GradientSpace) -> None:
    """Refuse a search whose copies of this rank's shards do not fit beside what training holds.

    A probe's activations are those of a training micro-batch, for which the allocator already has room.

    Raises:
        NotEnoughMemory: one sentence with both sizes.
    """
    needed = _NUM_COPIES * sum(local_shard(param).numel() * param.element_size() for param in space.params)
    device = space.params[0].device
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(
            f"a search needs {needed / 2**30:.2f} GiB beside training on {device}, and {free / 2**30:.2f} GiB are free"
        )


def free_bytes(device: torch.device) -> int:
    """What this process may still take on a device, with what the caching allocator holds without using it."""
    if device.type == "cpu":
        import psutil  # comes with accelerate, which verl installs

        return psutil.virtual_memory().available
    module = torch.get_device_module(device.type)
    return module.mem_get_info()[0] + module.memory_reserved() - module.memory_allocated()
