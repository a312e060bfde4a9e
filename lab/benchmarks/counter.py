# SPDX-License-Identifier: Apache-2.0
"""Count what a block of code asks of a device, on any machine: operations, reads by the host, collectives, bytes.

On a CPU every tensor is in the host's memory. Here all count as the device's, except those that would be the host's on
a GPU: made without a device, copied by ``.cpu()``, or computed from such tensors. A batch counts as the device's,
though a trainer moves some of it later; that is the same with and without gradloc.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradloc

PACKAGE = os.path.join(os.path.dirname(gradloc.__file__), "")
"""The package's folder."""

__all__ = ["PACKAGE", "DeviceCounter"]

_LIBRARIES = ("c10d", "_c10d_functional", "c10d_functional")
_OTHERS = ("wait_tensor", "_wrap_tensor_autograd")  # in the same libraries, but not communication
_READING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
_INDEXING = ("index", "index_put", "index_put_")
_COPIES = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)
_ALIAS = "alias"
_FACTORIES = (torch.tensor, torch.as_tensor)
_FILLED = (torch.zeros, torch.ones, torch.full, torch.empty, torch.arange)
_MOVES = (torch.Tensor.to, torch.Tensor.new_tensor)


class DeviceCounter(TorchDispatchMode):
    """A context manager that counts.

    ``ops``, ``reads`` and ``bytes`` are by phase, see :meth:`within`; ``collectives`` by their operator's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        """Number of reads by line of gradloc."""
        self.phase = ""
        self._functions = _Functions(self)

    def __enter__(self) -> "DeviceCounter":
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        super().__exit__(*error)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count everything in this context under a phase; the outermost phase wins."""
        before, self.phase = self.phase, phase if phase == _ALIAS else self.phase or phase
        try:
            yield
        finally:
            self.phase = before

    def read(self) -> None:
        """Count a read: the host waits for a number from the device."""
        self.reads[self.phase] += 1
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:
            name = frame.f_code.co_filename.removeprefix(PACKAGE)
            self.places[f"{self.phase} {name}:{frame.f_lineno}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor decompose it into operations that come back here
        given = kwargs or {}
        library, _, name = func.name().partition("::")
        if library in _LIBRARIES:
            if not name.startswith(_OTHERS):
                self.collectives[name] += 1
            return func(*args, **given)
        operands = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        # the scalar operands of an operation are on its tensors' device
        is_host = all(map(_is_host, operands)) if operands else given.get("device") is None or name == "scalar_tensor"
        made = func(*args, **given)
        if is_host or self.phase == _ALIAS or name == "lift_fresh":  # a constant of the program
            for leaf in tree_leaves(made):
                _mark(leaf, True)
            return made
        self.ops[self.phase] += 1
        if not func.is_view:
            self.bytes[self.phase] += sum(x.numel() * x.element_size() for x in operands if not _is_host(x))
        if name.partition(".")[0] in _READING or (name.partition(".")[0] in _INDEXING and _has_mask(args)):
            self.read()
        return made


class _Functions(TorchFunctionMode):
    """Intercept calls that are no operation on a CPU: ``.cpu()``, ``.tolist()``, and the device of a new tensor."""

    def __init__(self, counter: DeviceCounter):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _COPIES:
            if not _is_host(args[0]):
                self._counter.read()
            found = func(*args, **given)
            return self._alias(found, True) if isinstance(found, torch.Tensor) else found
        if func in _FILLED and given.get("device") is None:  # the operation below is always given one
            with self._counter.within(_ALIAS):
                return func(*args, **given)
        found = func(*args, **given)
        if func in _FACTORIES:
            _mark(found, given.get("device") is None)
        elif func in _MOVES and _is_host(found) and _names_device(args[1:], given):
            return self._alias(found, False)
        return found

    def _alias(self, tensor: torch.Tensor, is_host: bool) -> torch.Tensor:
        """Return another tensor with the same memory, marked as on the host or not."""
        with self._counter.within(_ALIAS):
            other = tensor.detach()
        other.requires_grad_(tensor.requires_grad)
        _mark(other, is_host)
        return other


def _is_host(tensor: Any) -> bool:
    return getattr(tensor, "_is_hosts", False)


def _mark(tensor: Any, is_host: bool) -> None:
    if isinstance(tensor, torch.Tensor):
        tensor._is_hosts = is_host  # type: ignore[attr-defined]


def _names_device(args: tuple, given: dict[str, Any]) -> bool:
    return "device" in given or any(isinstance(arg, str | int | torch.device | torch.Tensor) for arg in args)


def _has_mask(args: tuple) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool and not _is_host(x) for x in args[1] or ())
