# SPDX-License-Identifier: Apache-2.0
"""Whether a search fits into memory beside training, and how room is made for it where it does not.

With FSDP2's ``offload_policy`` the shards lie in the host's memory. So do all copies of them, and the host needs room
for those.

In this order, each dearer than the one before: everything stays on the device; the optimizer's state lies in the host's
memory until the search is over; so do the saved weights and the gradients that are set aside; bisection, which moves no
weights and reads no logits in float32; no search. All ranks go by the one that has least.

What a search holds at its peak, beyond what lies there anyway when a step is looked into (weights, optimizer, the
gradient that is set aside):

- copies of this rank's shards: a residual to search along or a replayed gradient, what the culprits' own backwards
  gave, and ``.grad`` while the next is made; in the host's memory all but ``.grad``;
- what a replayed micro-batch needs, which is what it needed in training: the step's own peak tells;
- or, in a forward alone, the logits in float32, which hold no activations beside them;
- or, while weights are moved, some float32 numbers for each element of a part of a shard.
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
_SCRATCH_BYTES = 20  # per element of a part, of which 14 to 18 were measured: what is drawn, its unit, the moved weight
_USABLE = 0.95  # of what is there: blocks do not fit seamlessly
_BLOCK = 2**30  # bytes that are taken at once to see whether they can be: as large as what a pass takes at once


@dataclass(frozen=True)
class Way:
    """One way to search."""

    is_full: bool = True
    """Whether any strategy may be taken; else bisection alone."""
    moves_optimizer: bool = False
    """Whether the optimizer's state lies in the host's memory meanwhile."""
    keeps_on_host: bool = False
    """Whether saved weights and gradients that are set aside do."""


WAYS = (Way(), Way(True, True), Way(True, True, True), Way(False, True, True))
"""The cheapest first."""


@dataclass(frozen=True)
class Memory:
    """A device's memory as this process sees it, in bytes."""

    free: int
    """That no process has taken."""
    idle: int = 0
    """That this process has taken and does not use."""
    allocated: int = 0
    """That it uses."""
    host: float = math.inf
    """This process' part of what is free in the host's memory, where a search takes of that."""

    @property
    def available(self) -> int:
        """What this process may still allocate."""
        return self.free + self.idle


@dataclass(frozen=True)
class Need:
    """What a search may need on one rank, in bytes."""

    shards: int
    """One copy of the rank's shards."""
    largest: int
    """Elements of the largest shard."""
    state: int
    """The optimizer's state on the device."""
    micro_batch: int
    """What a replayed micro-batch takes."""
    forward: int
    """What a forward alone takes: its logits."""
    host: int = 0
    """Copies of the shards, where these lie in the host's memory."""

    @property
    def working(self) -> int:
        """What any pass takes."""
        return max(self.micro_batch, self.forward)

    def of(self, way: Way) -> int:
        """What a search holds at its peak that way; what it frees before counts against that."""
        copies = 1 if way.keeps_on_host else _COPIES
        scratch = _SCRATCH_BYTES * min(self.largest, PART)
        working = max(self.working, scratch) if way.is_full else self.micro_batch
        return copies * self.shards + working - (self.state if way.moves_optimizer else 0)

    def least_way(self, memory: Memory) -> int:
        """The number of the cheapest of ``WAYS`` that fits; how many there are where none does."""
        if self.host > _USABLE * memory.host:
            return len(WAYS)
        fitting = (number for number, way in enumerate(WAYS) if self.of(way) <= _USABLE * memory.available)
        return next(fitting, len(WAYS))

    def refusal(self, memory: Memory, where: Any) -> str:
        """Why there is no search, and what would help, in a sentence."""
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
    """What a training micro-batch takes at its peak, beside what lies there when its step is looked into.

    The allocator's peak is of the process' life, in which another pass may have taken more. Where it says nothing of
    the step, it is reset, once.
    """

    def __init__(self) -> None:
        self.size = 0
        """In bytes; the largest of the steps that told."""
        self._before = 0
        self._has_reset = False

    def begin(self, device: torch.device) -> None:
        """Before a step's first micro-batch."""
        if not self.size and not self._has_reset:
            reset_peak(device)
            self._has_reset = True
        self._before = peak_of(device)[0]

    def end(self, device: torch.device) -> None:
        """Behind its last backward."""
        peak, allocated = peak_of(device)
        if peak > self._before or not self.size:
            self.size = max(self.size, peak - allocated)


class Room:
    """Room for one search on this rank's device.

    Args:
        space: the trainable parameters.
        optimizer: whose state may be moved; None where nothing is known of it.
        micro_batch: see :class:`Need`.
        forward: likewise.
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
        """What there is now."""
        found = memory_of(self.device)
        if not self._space.is_offloaded:
            return found
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return replace(found, host=memory_of(torch.device("cpu")).free / beside)

    def make(self, way: Way) -> None:
        """Move to the host what this way says; what has been moved is taken back by :meth:`close`, also after a
        failure."""
        if way.moves_optimizer:
            for tensor in self._state:
                self._moved.append((tensor, host_copy(tensor)))
            if self.device.type != "cpu":  # the copies run beside the host
                torch.get_device_module(self.device.type).synchronize(self.device)
            for tensor, _ in self._moved:
                tensor.untyped_storage().resize_(0)
        self._space.room, self._space.keeps_on_host = self, way.keeps_on_host

    def make_sure(self) -> None:
        """Take what the next pass needs and give it back: where a rank lacks it, that is known before any collective
        of the pass, and what it takes later is there."""
        missing = 0
        if not self._space.is_offloaded:
            missing = sum(_size(local_shard(param)) for param in self._space.params if param.grad is None)
        sizes = [self.need.forward]
        left = self.need.working + missing - self.need.forward
        sizes += [min(_BLOCK, left - first) for first in range(0, left, _BLOCK)]
        taken = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        del taken

    def close(self) -> None:
        """Take everything back: the very same tensors, bit for bit."""
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
    """What there is on a device."""
    if device.type == "cpu":
        import psutil  # comes with accelerate, which verl installs

        return Memory(free=psutil.virtual_memory().available)
    module = torch.get_device_module(device.type)
    idle = idle_bytes(module.memory_snapshot(), device.index or 0)
    return Memory(module.mem_get_info(device)[0], idle, module.memory_allocated(device))


def peak_of(device: torch.device) -> tuple[int, int]:
    """What this process has used of a device at most, and uses now; nothing is known of a CPU."""
    if device.type == "cpu":
        return 0, 0
    module = torch.get_device_module(device.type)
    return module.max_memory_allocated(device), module.memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    """Have the peak begin anew."""
    if device.type != "cpu":
        torch.get_device_module(device.type).reset_peak_memory_stats(device)


def idle_bytes(segments: Iterable[Mapping[str, Any]], device: int) -> int:
    """What an allocator has taken and does not use, of its own pool: others' segments, such as those of a rollout that
    sleeps, cannot be had.

    Args:
        segments: of the allocator's snapshot.
        device: index.
    """
    own = [s for s in segments if s["device"] == device and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def free_bytes(device: torch.device) -> int:
    """What this process may still take on a device."""
    return memory_of(device).available


def _state_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterable[torch.Tensor]:
    """The tensors of an optimizer's state that lie on a device and have their memory for themselves."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                shard = local_shard(value)
                if shard.device.type == device.type and shard.untyped_storage().nbytes() == _size(shard):
                    yield shard


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
