# SPDX-License-Identifier: Apache-2.0
"""A device's memory, simulated: what a process's tensors take, what its allocator keeps, and where there is no more.

As a GPU's allocator does, it keeps what has been freed, so nobody else can have it: what a search has taken and given
back is there when it takes it again, even where the device has no more to give.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradloc.core.memory_plans import Memory


class Card(TorchDispatchMode):
    """Context in which every new tensor takes memory of this device.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: float = math.inf):
        super().__init__()
        self.capacity = capacity
        self.live = self.reserved = self.peak = 0
        self.num_allocations = self.num_errors = 0
        self.needs: list[Any] = []
        """What searches said that they need, and by which number of way,"""
        self.ways: list[int] = []
        self.on_allocation: Callable[[], None] = lambda: None
        """Called before each."""
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def memory(self) -> Memory:
        """As :func:`gradloc.core.memory.memory_of` would tell it."""
        return Memory(int(min(self.capacity - self.reserved, 2**40)) + self.reserved - self.live)

    def fill(self) -> None:
        """From now on there is no more than what this process has taken."""
        self.capacity = self.reserved

    def __enter__(self) -> "Card":
        super().__enter__()
        card, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if storage._cdata in card._sizes:
                card._change(storage._cdata, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
            self._change(key, storage.nbytes())

    def _change(self, key: int, size: int) -> None:
        more = size - self._sizes[key]
        if more > 0:
            self.num_allocations += 1
            self.on_allocation()
            if self.live + more > max(self.reserved, self.capacity):
                self.num_errors += 1
                raise torch.OutOfMemoryError(f"tried to allocate {more} bytes, {self.capacity - self.live} are left")
        self._sizes[key] = size
        self.live += more
        self.reserved = max(self.reserved, self.live)
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
