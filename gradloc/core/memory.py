# SPDX-License-Identifier: Apache-2.0
"""Does a search fit into memory beside training, and if not, how is room made for it?

Four ways, each slower or weaker than the one before (:data:`WAYS`): keep everything on the device; move the optimizer's
state to the host until the search is over; also keep saved weights and gradients there; bisection only, which moves no
weights and reads no float32 logits. If none fits, there is no search. All ranks take the way of the one with the least
memory. With FSDP2's ``offload_policy`` shards and all copies of them lie in the host's memory, so the host needs room.

At its peak a search holds, beyond what training has at the end of a backward (weights, optimizer state, the gradient):

- three copies of this rank's shards: a direction or a replayed gradient, the culprits' own gradient, and the ``.grad``
  that is being made. With copies on the host, ``.grad`` alone stays on the device;
- what a replayed micro-batch takes, which is what it took in training: the step's measured peak;
- or, in a forward without a graph, the logits in float32;
- or, while weights move, some float32 temporaries for each element of a part of a shard.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .gradients import PART, GradientSpace, host_copy
from .sharding import local_shard

_COPIES = 3
_SCRATCH_BYTES = 20  # per element of a part; 14 to 18 were measured: random numbers, the unit, the moved weight
_USABLE = 0.95  # of the free memory; the rest is lost to fragmentation
_BLOCK = 2**30  # bytes per trial allocation, about what a pass allocates at once


@dataclass(frozen=True)
class Way:
    """One way to search."""

    is_full: bool = True
    """Whether any strategy will do; else only bisection."""
    moves_optimizer: bool = False
    """Whether the optimizer's state waits on the host."""
    keeps_on_host: bool = False
    """Whether saved weights and gradients set aside lie on the host."""


WAYS = (Way(), Way(True, True), Way(True, True, True), Way(False, True, True))
"""The cheapest first."""


@dataclass(frozen=True)
class Memory:
    """A device's memory as this process sees it, in bytes."""

    free: int
    """Taken by no process."""
    idle: int = 0
    """Held by this process' allocator, but unused."""
    allocated: int = 0
    """In use by this process."""
    host: float = math.inf
    """This process' share of the host's free memory; inf if a search needs none of it."""

    @property
    def available(self) -> int:
        """What this process may still allocate."""
        return self.free + self.idle


@dataclass(frozen=True)
class Need:
    """What a search needs on one rank, in bytes."""

    shards: int
    """One copy of the rank's shards."""
    largest: int
    """Elements (not bytes) of the largest shard."""
    state: int
    """The optimizer's state on the device, which may move."""
    micro_batch: int
    """Forward and backward of one micro-batch."""
    forward: int
    """A forward alone: its float32 logits."""
    host: int = 0
    """Copies of the shards, if these lie in the host's memory."""

    @property
    def working(self) -> int:
        """The most that one pass takes."""
        return max(self.micro_batch, self.forward)

    def of(self, way: Way) -> int:
        """Peak of a search that way, less what it frees on the device beforehand."""
        copies = 1 if way.keeps_on_host else _COPIES
        scratch = _SCRATCH_BYTES * min(self.largest, PART)
        working = max(self.working, scratch) if way.is_full else self.micro_batch
        return copies * self.shards + working - (self.state if way.moves_optimizer else 0)

    def least_way(self, memory: Memory) -> int:
        """Index in ``WAYS`` of the first one that fits; ``len(WAYS)`` if none does."""
        if self.host > _USABLE * memory.host:
            return len(WAYS)
        fitting = (number for number, way in enumerate(WAYS) if self.of(way) <= _USABLE * memory.available)
        return next(fitting, len(WAYS))

    def refusal(self, memory: Memory, where: Any) -> str:
        """Why there is no search and what would help, as a sentence; ``where`` names the device."""
        if self.host > _USABLE * memory.host:
            return (
                f"a search needs {self.host / _USABLE / 2**30:.2f} GiB of the host's memory for each process, and "
                f"{memory.host / 2**30:.2f} GiB are free: the weights lie there by offload_policy; deal them out to "
                "more hosts"
            )
        lacking = self.of(WAYS[-1]) / _USABLE - memory.available
        return (
            f"a search needs {max(lacking, 0) / 2**30:.2f} GiB more than the {memory.available / 2**30:.2f} GiB that "
            f"training leaves on {where}: make micro-batches smaller (one takes {self.working / 2**30:.2f} GiB; "
            "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu), or deal the weights out to more devices"
        )


class StepPeak:
    """How much more a training micro-batch takes at its peak than is in use when the step is looked into.

    The allocator knows the peak since the process began, which another pass may have set, such as the log-probs'. So it
    is reset once, before the first step. After that only a step that raises the peak tells anything.
    """

    def __init__(self) -> None:
        self.size = 0
        """In bytes: the largest so far."""
        self._before = 0
        self._has_reset = False

    def begin(self, device: torch.device) -> None:
        """Call before a step's first micro-batch."""
        if not self.size and not self._has_reset:
            reset_peak(device)
            self._has_reset = True
        self._before = peak_of(device)[0]

    def end(self, device: torch.device) -> None:
        """Call after its last backward."""
        peak, allocated = peak_of(device)
        if peak > self._before or not self.size:
            self.size = max(self.size, peak - allocated)


class Room:
    """Makes room for one search on this rank's device, and takes it back.

    Args:
        space: the trainable parameters.
        optimizer: whose state may be moved; None if that is unknown.
        micro_batch: see :class:`Need`.
        forward: see :class:`Need`.
    """

    def __init__(self, space: GradientSpace, optimizer: torch.optim.Optimizer | None, micro_batch: int, forward: int):
        self._space, self.device = space, space.device
        self._state = [] if optimizer is None else list(_state_of(optimizer, self.device))
        shards = [local_shard(param) for param in space.params]
        size, largest = sum(map(_size, shards)), max(shard.numel() for shard in shards)
        self.need = Need(
            shards=0 if space.is_offloaded else size,
            largest=0 if space.is_offloaded else largest,
            state=sum(map(_size, self._state)),
            micro_batch=micro_batch,
            forward=forward,
            host=_COPIES * size + _SCRATCH_BYTES * min(largest, PART) if space.is_offloaded else 0,
        )
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def memory(self) -> Memory:
        """The memory that there is now."""
        found = memory_of(self.device)
        if not self._space.is_offloaded:
            return found
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return replace(found, host=memory_of(torch.device("cpu")).free / beside)

    def make(self, way: Way) -> None:
        """Move to the host what this way says. :meth:`close` takes it back, also if this failed half way."""
        if way.moves_optimizer:
            for tensor in self._state:
                self._moved.append((tensor, host_copy(tensor)))
            if self.device.type != "cpu":  # the copies are asynchronous: wait before freeing what they read
                torch.get_device_module(self.device.type).synchronize(self.device)
            for tensor, _ in self._moved:
                tensor.untyped_storage().resize_(0)
        self._space.room, self._space.keeps_on_host = self, way.keeps_on_host

    def make_sure(self) -> None:
        """Allocate what the next pass needs and free it again.

        If a rank has not enough, it fails here, before any collective of the pass, where all ranks can recover. If it
        has, the allocator keeps the blocks for the pass.
        """
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


def memory_of(device: torch.device) -> Memory:
    """The memory of a device now."""
    if device.type == "cpu":
        import psutil  # comes with accelerate, which verl installs

        return Memory(free=psutil.virtual_memory().available)
    module = torch.get_device_module(device.type)
    idle = idle_bytes(module.memory_snapshot(), device.index or 0)
    return Memory(module.mem_get_info(device)[0], idle, module.memory_allocated(device))


def peak_of(device: torch.device) -> tuple[int, int]:
    """(most that this process has used of a device, what it uses now), in bytes; zeros for a CPU."""
    if device.type == "cpu":
        return 0, 0
    module = torch.get_device_module(device.type)
    return module.max_memory_allocated(device), module.memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak anew."""
    if device.type != "cpu":
        torch.get_device_module(device.type).reset_peak_memory_stats(device)


def idle_bytes(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """Bytes that the allocator holds unused in its default pool.

    Memory in other pools, such as that of a sleeping rollout engine, cannot be used by a search.

    Args:
        segments: ``torch.cuda.memory_snapshot()``.
        device: index.
    """
    own = [s for s in segments if s["device"] == device and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def free_bytes(device: torch.device) -> int:
    """What this process may still allocate on a device."""
    return memory_of(device).available


def _state_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterable[torch.Tensor]:
    """An optimizer's state tensors on a device; only those that own their whole storage, which can then be freed."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                shard = local_shard(value)
                if shard.device.type == device.type and shard.untyped_storage().nbytes() == _size(shard):
                    yield shard


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
