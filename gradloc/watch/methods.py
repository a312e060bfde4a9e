# SPDX-License-Identifier: Apache-2.0
"""Hook methods that a loop calls in place of the model, such as ``model.encode(x)`` or ``model.loss(batch)``."""

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

_TRAINERS = ("lightning", "pytorch_lightning")  # whose module's methods log, and are inspected
_LIBRARIES = ("torch", "transformers", "peft", "gradloc")


class HookableMethod(torch.nn.Module):
    """A method of a model, as a module that can be hooked. Copying or pickling the model restores the plain one."""

    def __init__(self, model: torch.nn.Module, function: FunctionType):
        super().__init__()
        self.method = MethodType(function, model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return MethodType, (self.method.__func__, self.method.__self__)

    def remove(self) -> None:
        """Give the model its own method back."""
        vars(self.method.__self__).pop(self.method.__name__, None)


def make_hookable(model: torch.nn.Module) -> Iterator[HookableMethod]:
    """Replace the methods that the model's own classes define, on this model alone."""
    classes = {owner: owner.__module__.partition(".")[0] for owner in type(model).__mro__}
    if any(root in _TRAINERS for root in classes.values()):
        return
    for owner, root in classes.items():
        for name, function in vars(owner).items() if root not in _LIBRARIES else ():
            is_own = isinstance(function, FunctionType) and not hasattr(torch.nn.Module, name)
            if is_own and not name.startswith("_") and name not in vars(model):
                found = HookableMethod(model, function)
                vars(model)[name] = found  # bypasses __setattr__, which would register a submodule
                yield found
