# SPDX-License-Identifier: Apache-2.0
"""Hooks of a tap that torch.compile does not trace, and whose errors do not reach the loop; and a model's methods, made
so that they can be hooked.
"""

import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

_TRAINERS = ("lightning", "pytorch_lightning")  # whose module's methods log, and are inspected
_LIBRARIES = ("torch", "transformers", "peft", "gradloc")


class Hook:
    """Calls a tap's method outside of torch.compile's traces. A copy of the model gets :class:`NoHook`."""

    def __init__(self, tap: Any, name: str, *given: Any):
        self.tap, self.name, self.given = tap, name, given

    def __call__(self, *given: Any) -> Any:
        if torch.compiler.is_compiling() and _is_one_graph():
            return None
        return call_hook(self, *given)

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    """Replaces a hook in a copy or a file of the model."""

    def __call__(self, *given: Any) -> None:
        return None


@torch.compiler.assume_constant_result
def _is_one_graph() -> bool:
    """Return whether ``fullgraph=True`` forbids a call into Python here; asked while torch.compile traces."""
    translator = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator
    return bool(getattr(translator.current_tx(), "one_graph", False))


@torch.compiler.disable
def call_hook(hook: Hook, *given: Any) -> Any:
    """Call the hook. In training its errors do not reach the loop."""
    tap = hook.tap
    if tap.has_failed or torch._C._functorch.maybe_current_level() is not None:  # torch.func's tensors have no storage
        return None
    try:
        return getattr(tap, hook.name)(*hook.given, *given)
    except Exception as error:
        if tap.is_again:
            raise
        tap.give_up(error)
        return None


class HookableMethod(torch.nn.Module):
    """A method that a loop calls in place of the model, such as ``model.encode(x)``, as a module that can be hooked.

    Copying or pickling the model restores the plain one.
    """

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
