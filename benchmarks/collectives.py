# SPDX-License-Identifier: Apache-2.0
"""Counts every collective that a block of code enters, where torch itself dispatches them.

Python-level wrappers, FSDP's own calls and functional collectives all end as operators of the
``c10d`` and ``_c10d_functional`` libraries, so none is missed however it was called.
"""

from collections import Counter

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARIES = ("c10d", "_c10d_functional", "c10d_functional")
_OTHERS = ("wait_tensor", "_wrap_tensor_autograd")  # in the same libraries, but no communication


class CollectiveCounter(TorchDispatchMode):
    """Context that counts; ``counts`` maps an operator's name to its number of calls."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor break it down: its collectives come back here
        library, _, name = func.name().partition("::")
        if library in _LIBRARIES and not name.startswith(_OTHERS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
