# SPDX-License-Identifier: Apache-2.0
"""The plans by which a search keeps its tensors in the memory that training leaves, and what each takes.

docs/gpu.md describes the plans (:data:`PLANS`), each slower or weaker than the one before. With FSDP2's
``offload_policy`` shards and all copies of them are in the host's memory, so the host needs room.

At its peak a search holds, beyond what training has at the end of a backward (weights, optimizer state, the gradient):

- three copies of this rank's shards: a direction or a replayed gradient, the culprits' own gradient, and the ``.grad``
  that is being made. With copies on the host, ``.grad`` alone stays on the device;
- what a replayed micro-batch takes, which is what it took in training: the step's measured peak;
- or, in a forward without a graph, the logits in float32;
- or, while weights move, some float32 temporaries for each element of a part of a shard.

Imports no torch, since :mod:`..forecast` needs none.
"""

import math
from dataclasses import dataclass
from typing import Any

GIB = 2**30
"""Bytes."""
FLOAT32 = 4
"""Bytes of a number that is trained."""
COPIES = 3
"""Copies of a rank's shards that a search holds: a direction, the culprits' gradient, the one that is being made."""
SAMPLE = 2**11
"""Elements of a parameter that are copied at each step, twice, to see how far it moved."""
LOGIT_BYTES = 4.5
"""Bytes of a logit in a forward without a graph: float32, and an eighth for what is computed of a part."""
SCRATCH_BYTES = 20
"""Bytes per element of a part: 12 were measured for a direction in half precision, and 8 are copies from the host."""
PART = 2**23
"""Elements of a shard that a card works on at a time, so that temporaries stay small."""
HOST_PART = 2**17
"""Elements of a shard that a CPU works on: parts that fit its cache move SmolLM2's weights half as fast again."""
USABLE = 0.95
"""The part of free memory that can be allocated; the rest is lost to fragmentation."""


@dataclass(frozen=True)
class SearchPlan:
    """A plan of where a search keeps its tensors, and so which strategies fit."""

    is_full: bool = True
    """Whether every strategy fits; if not, bisection alone does."""
    moves_optimizer: bool = False
    """Whether the optimizer's state waits on the host."""
    keeps_on_host: bool = False
    """Whether saved weights and gradients set aside are kept on the host."""


PLANS = (SearchPlan(), SearchPlan(True, True), SearchPlan(True, True, True), SearchPlan(False, True, True))
"""The cheapest first."""


@dataclass(frozen=True)
class Memory:
    """A device's memory as this process sees it, in bytes."""

    free: int
    """Bytes that this process may still allocate: taken by no process, or unused in its own allocator."""
    host: float = math.inf
    """This process' share of the host's free memory; inf if a search needs none of it."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a search needs on one rank, in bytes."""

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
    """Host memory for copies of the shards, if these are there."""
    pinned_state: int = 0
    """Host memory for the optimizer's state, if that moves."""
    pinned_copies: int = 0
    """Host memory for saved weights and gradients, if those are kept there."""

    @property
    def working(self) -> int:
        """The most that one pass takes."""
        return max(self.micro_batch, self.forward)

    def peak_bytes(self, plan: SearchPlan) -> int:
        """Return the peak of a search by this plan, less what it frees on the device beforehand."""
        copies = 1 if plan.keeps_on_host else COPIES
        scratch = SCRATCH_BYTES * min(self.largest, PART)
        working = max(self.working, scratch) if plan.is_full else self.micro_batch
        return copies * self.shards + working - (self.state if plan.moves_optimizer else 0)

    def host_bytes(self, plan: SearchPlan) -> int:
        """Return the host memory that a search takes by this plan."""
        moved = self.pinned_state if plan.moves_optimizer else 0
        return self.host + moved + (self.pinned_copies if plan.keeps_on_host else 0)

    def cheapest_plan(self, memory: Memory) -> int:
        """Return the index in ``PLANS`` of the first one that fits; ``len(PLANS)`` if none does."""
        device, host = USABLE * memory.free, USABLE * memory.host
        fitting = (
            n for n, plan in enumerate(PLANS) if self.peak_bytes(plan) <= device and self.host_bytes(plan) <= host
        )
        return next(fitting, len(PLANS))

    def refusal(self, memory: Memory, where: Any) -> str:
        """Say why there is no search and what would help, in a sentence; ``where`` names the device."""
        on_device = [self.host_bytes(plan) for plan in PLANS if self.peak_bytes(plan) <= USABLE * memory.free]
        least = min(on_device, default=0)
        if least > USABLE * memory.host:
            why = "the weights are there by offload_policy" if self.host else "the device has no room of its own"
            return (
                f"a search needs {least / USABLE / GIB:.2f} GiB of the host's memory for each process, and "
                f"{memory.host / GIB:.2f} GiB are free: {why}; run fewer processes on each host"
            )
        lacking = self.peak_bytes(PLANS[-1]) / USABLE - memory.free
        return (
            f"a search needs {max(lacking, 0) / GIB:.2f} GiB more than the {memory.free / GIB:.2f} GiB that "
            f"training leaves on {where}: make micro-batches smaller (one takes {self.working / GIB:.2f} GiB; "
            "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu), or deal the weights out to more devices"
        )


def rounded(size: int) -> int:
    """Return what a pinned block takes of the host, in bytes: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def logit_bytes(is_scaled: bool = False, has_entropy: bool = False) -> float:
    """Return the bytes that a forward alone holds for each logit at its peak: in float32, and what verl makes of it.

    Args:
        is_scaled: whether a temperature makes a second tensor of them.
        has_entropy: whether entropies are computed from all of them at once.
    """
    return LOGIT_BYTES + FLOAT32 * is_scaled + 2 * FLOAT32 * has_entropy
