# SPDX-License-Identifier: Apache-2.0
"""Make room for a search in the memory that training leaves, by one of the plans of :mod:`.memory_plans`, and undo it.

All ranks follow the plan of the one with the least memory.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .gradients import GradientSpace, host_copy
from .memory_plans import COPIES, GIB, Memory, MemoryNeed, SearchPlan, rounded
from .sharding import local_shard

_BLOCK = GIB  # per trial allocation, about what a pass allocates at once


class StepPeak:
    """The memory that a training micro-batch takes at its peak, over what is in use when the step is looked into.

    The allocator knows the peak since it was last reset, which another pass may have set, such as the log-probs' with
    its larger micro-batches. So it is reset before each step; what it was until then is kept for those who report it.
    """

    def __init__(self) -> None:
        self.size = 0
        """The largest so far, in bytes."""
        self._before = 0, 0  # bytes used and reserved at most, before the last reset

    def begin(self, device: torch.device) -> None:
        """Call before a step's first micro-batch."""
        self._before = self.most(device)
        reset_peak(device)

    def end(self, device: torch.device) -> None:
        """Call after its last backward."""
        peak, allocated = peak_of(device)
        self.size = max(self.size, peak - allocated)

    def most(self, device: torch.device) -> tuple[int, int]:
        """Return the most that this process has used and its allocator reserved, across resets: bytes, 0 for a CPU."""
        used, reserved = self._before
        return max(used, peak_of(device)[0]), max(reserved, reserved_of(device))


class SearchMemory:
    """Makes room for one search on this rank's device, and takes it back.

    Args:
        space: the trained parameters.
        optimizer: its state may be moved; None if it is unknown.
        micro_batch: bytes, see :class:`MemoryNeed`.
        forward: bytes of a forward alone.
    """

    def __init__(self, space: GradientSpace, optimizer: torch.optim.Optimizer | None, micro_batch: int, forward: int):
        self._space, self.device = space, space.device
        self._state = [] if optimizer is None else list(_state_of(optimizer, self.device))
        shards = [local_shard(param) for param in space.params]
        size, largest = sum(map(_size, shards)), max(shard.numel() for shard in shards)
        self.need = MemoryNeed(
            shards=0 if space.is_offloaded else size,
            largest=0 if space.is_offloaded else largest,
            state=sum(map(_size, self._state)),
            micro_batch=micro_batch,
            forward=forward,
            host=COPIES * size if space.is_offloaded else 0,
            pinned_state=sum(map(pinned_bytes, self._state)),
            pinned_copies=0 if space.is_offloaded else COPIES * sum(map(pinned_bytes, shards)),
        )
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def memory(self) -> Memory:
        """Read the memory that is free now."""
        found = memory_of(self.device)
        if self.device.type == "cpu":  # whose memory is the host's
            return found
        return replace(found, host=memory_of(torch.device("cpu")).free / processes_on_host())

    def make(self, plan: SearchPlan) -> None:
        """Move to the host what this plan says. :meth:`close` takes it back, also if this failed in the middle."""
        if plan.moves_optimizer:
            for tensor in self._state:
                self._moved.append((tensor, host_copy(tensor)))
            if self.device.type != "cpu":  # the copies are asynchronous: wait before freeing what they read
                torch.get_device_module(self.device.type).synchronize(self.device)
            for tensor, _ in self._moved:
                tensor.untyped_storage().resize_(0)
        self._space.room, self._space.keeps_on_host = self, plan.keeps_on_host

    def make_sure(self) -> None:
        """Allocate what the next pass needs and free it again.

        If a rank has not enough, it fails here, before any collective of the pass, where all ranks can recover. If it
        has, the allocator keeps the blocks for the pass.
        """
        self._space.reshard()  # weights that a forward left gathered are part of what a pass takes
        missing = 0
        if not self._space.is_offloaded:
            missing = sum(_size(local_shard(param)) for param in self._space.params if param.grad is None)
        sizes = [self.need.forward]
        left = self.need.working + missing - self.need.forward
        sizes += [min(_BLOCK, left - first) for first in range(0, left, _BLOCK)]
        taken = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        del taken

    def close(self) -> None:
        """Move everything back into the same tensors, bit for bit."""
        self._space.room, self._space.keeps_on_host = None, False
        for tensor, copy in self._moved:
            size = _size(tensor)
            if tensor.untyped_storage().nbytes() < size:
                tensor.untyped_storage().resize_(size)
                tensor.copy_(copy, non_blocking=True)
        if self._moved and self.device.type != "cpu":
            torch.get_device_module(self.device.type).synchronize(self.device)
        self._moved.clear()
        if self.device.type == "cuda":  # give the pinned host blocks back
            getattr(torch._C, "_host_emptyCache", lambda: None)()


def memory_of(device: torch.device) -> Memory:
    """Read the free memory of a device."""
    if device.type == "cpu":
        return Memory(free=int(min(host_free(), cgroup_free(), sys.maxsize)))
    module = torch.get_device_module(device.type)
    try:  # without the history of allocations, which may be huge
        segments = module.memory_snapshot(include_traces=False)
    except TypeError:  # an older torch
        segments = module.memory_snapshot()
    return Memory(module.mem_get_info(device)[0] + idle_bytes(segments, device.index or 0))


def host_free(path: str = "/proc/meminfo") -> float:
    """Return what the host may still give out without swapping, in bytes; inf where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # not Linux
        return math.inf


_CGROUP_V2 = ("memory.max", "memory.current")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def cgroup_free(folder: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float:
    """Return what the limits on this process' groups leave of the host's memory, in bytes; inf without a limit.

    A job's own group may be below the container's, and each between them has a limit (cgroup v2 and v1).
    """
    places = [("", _CGROUP_V2), ("memory", _CGROUP_V1)]
    with contextlib.suppress(OSError):
        for line in Path(own).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, names = ("memory", _CGROUP_V1) if "memory" in controllers.split(",") else ("", _CGROUP_V2)
            if root or not controllers:  # v1's memory controller, or v2's only hierarchy
                groups = [part for part in path.split("/") if part]
                places += [("/".join([root, *groups[: end + 1]]).lstrip("/"), names) for end in range(len(groups))]
    return min((_left_of(Path(folder) / place, names) for place, names in places), default=math.inf)


def _left_of(group: Path, names: tuple[str, str]) -> float:
    """Return what one group's limit leaves, in bytes. The kernel gives up idle page cache, so that counts as free."""
    try:
        most, used, stat = ((group / name).read_text() for name in (*names, "memory.stat"))
        found = dict(line.split() for line in stat.splitlines())
        idle = int(found.get("total_inactive_file", found.get("inactive_file", 0)))
        return math.inf if most.strip() == "max" else int(most) - int(used) + idle
    except (OSError, ValueError):
        return math.inf


def processes_on_host() -> int:
    """Return how many training processes share this host's memory. verl sets LOCAL_WORLD_SIZE to 1, so Ray's counts."""
    return max(int(os.environ.get(name) or 1) for name in ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"))


def pinned_bytes(tensor: torch.Tensor) -> int:
    """Return what a pinned copy of a tensor takes of the host, in bytes."""
    return rounded(_size(tensor))


def peak_of(device: torch.device) -> tuple[int, int]:
    """Return the most that this process has used of a device, and what it uses now, in bytes; zeros for a CPU."""
    if device.type == "cpu":
        return 0, 0
    module = torch.get_device_module(device.type)
    return module.max_memory_allocated(device), module.memory_allocated(device)


def reserved_of(device: torch.device) -> int:
    """Return the most that the allocator of this process has reserved of a device, in bytes; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.get_device_module(device.type).max_memory_reserved(device)


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew."""
    if device.type != "cpu":
        torch.get_device_module(device.type).reset_peak_memory_stats(device)


def idle_bytes(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Return the bytes that the allocator holds unused in its default pool.

    Memory in other pools, such as that of a sleeping rollout engine, cannot be used by a search. ``segments`` are those
    of ``torch.cuda.memory_snapshot()``.
    """
    own = [s for s in segments if s["device"] == device and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def _state_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterable[torch.Tensor]:
    """Yield an optimizer's state tensors on a device, those that own their whole storage, which can then be freed."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                shard = local_shard(value)
                if shard.device.type == device.type and shard.untyped_storage().nbytes() == _size(shard):
                    yield shard


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
