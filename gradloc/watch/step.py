# SPDX-License-Identifier: Apache-2.0
"""What a loop's forward gives, and how it is run again.

Shapes: B rows of a micro-batch, T positions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from ..core.sharding import reduction_deferred
from ..core.step import Outputs

Forward = Callable[[], Any]
"""Gives log-probs (B, T), or a tuple of these, entropies (B, T) or None, and a scalar of what else the loss is made of
or None."""


class LoopStep:
    """What steps that are run again from a model's inputs share.

    Args:
        module: as the loop calls it: plain, DDP, FSDP1 or FSDP2.
        num_ranks: processes that the gradient is averaged over.
        scale: gives what the loss was multiplied by (fp16).
    """

    around_pass: Callable[[bool], AbstractContextManager[None]] | None = None
    """An engine's own, around a micro-batch of a pass; called with whether it is the last."""

    def __init__(self, module: torch.nn.Module, num_ranks: int, scale: Callable[[], float]):
        self.module, self.num_ranks, self._scale = module, num_ranks, scale

    reduces_once = False
    """Whether ranks sum the gradient after the last micro-batch alone."""

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        if self.around_pass is not None:
            return self.around_pass(is_last)
        return reduction_deferred(self.module) if self.reduces_once and not is_last else nullcontext()


def auxiliary_loss(output: Any) -> torch.Tensor | None:
    """Return what a transformers model's output has of a loss that passes through no hidden state: routers' balancing
    loss."""
    found = getattr(output, "aux_loss", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None


def returned_log_probs(output: Any) -> Outputs | None:
    """Return the log-probs (B, T) that a model's output has, its entropies and its auxiliary loss; None without any."""
    found = getattr(output, "log_probs", None)
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or not found.requires_grad and torch.is_grad_enabled():
        return None
    return Outputs(found, getattr(output, "entropy", None), auxiliary_loss(output))


def outputs_of(given: Any) -> Outputs:
    """What a loop's function gave, as a search reads it.

    Raises:
        ValueError: one sentence, where it gave something else.
    """
    parts = [*given] if isinstance(given, tuple | list) else [given]
    are_tensors = [isinstance(part, torch.Tensor) or (place and part is None) for place, part in enumerate(parts)]
    if not (1 <= len(parts) <= 3 and all(are_tensors)):
        found = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            "Watch.log_probs takes a function that returns log_probs, (log_probs, entropies) or (log_probs, entropies, "
            f"part), all tensors and the last two maybe None, found {found}."
        )
    return Outputs(*parts)


def frozen(forward: Forward) -> Forward:
    """The function with the values that its variables have now: a loop gives them others before it is run again."""
    if not isinstance(forward, FunctionType):
        return forward
    without_value = CellType()  # equal to any other whose variable has no value yet
    closure = forward.__closure__ or ()
    cells = tuple(cell if cell == without_value else CellType(cell.cell_contents) for cell in closure)
    there = forward.__globals__
    names = _names_in(forward.__code__) | {"__name__", "__builtins__"}
    used = {name: there[name] for name in names if name in there}
    kept = FunctionType(forward.__code__, used, forward.__name__, forward.__defaults__, cells)
    kept.__kwdefaults__ = forward.__kwdefaults__
    return kept


def _names_in(code: CodeType) -> set[str]:
    """The global variables that it may read, and those of the functions in it: a script's others may be large."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def autocast_now(device: torch.device) -> tuple[Callable[[], AbstractContextManager[Any]], torch.dtype | None]:
    """The autocast that is on, to be entered again, and its dtype; None where it is off."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return lambda: torch.autocast(kind, dtype=dtype, enabled=dtype is not None), dtype
