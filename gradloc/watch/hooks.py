# SPDX-License-Identifier: Apache-2.0
"""Hooks of a tap that torch.compile does not trace, and whose errors do not reach the loop."""

import sys
from typing import Any

import torch


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
