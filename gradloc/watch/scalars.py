# SPDX-License-Identifier: Apache-2.0
"""Scalars of a forward that pass by the last hidden state, such as routers' balancing losses.

A model returns them, or leaves them in attributes of its modules. The loss takes them from there, so that each has one
coefficient, which training's backward leaves.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from .forwarded import RecordedForward


class Scalars:
    """The scalars of a model's forwards, in a fixed order: first those of its output."""

    def __init__(self) -> None:
        self.places: list[int] = []
        """Of those among the output's tensors."""
        self.attributes: list[ScalarAttribute] = []

    def __len__(self) -> int:
        return len(self.places) + len(self.attributes)

    def hook(self, present: RecordedForward, index: int, value: torch.Tensor) -> None:
        """Keep the gradient of the value with this number in the forward's ``model_auxiliary``, (K,) of K scalars."""
        value.register_hook(partial(self._keep, present, index))

    def hook_attributes(self, present: RecordedForward) -> None:
        """Hook aliases of the attributes: the model may have used the values themselves."""
        for index, attribute in enumerate(self.attributes, len(self.places)):
            if (value := attribute.alias()) is not None:
                self.hook(present, index, value)

    def stacked(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the last forward's values (K,); None where one is missing, or there is none.

        Args:
            leaves: the tensors of its output.
        """
        found = [leaves[place] for place in self.places if place < len(leaves)]
        found += [value for attribute in self.attributes if (value := attribute.value) is not None]
        return torch.stack(found) if found and len(found) == len(self) else None

    def _keep(self, present: RecordedForward, index: int, grad: torch.Tensor) -> None:
        coefficients = grad.new_zeros(len(self))
        coefficients[index] = grad
        present.add("model_auxiliary", coefficients)


class ScalarAttribute(NamedTuple):
    """A scalar with a graph that forwards leave in an attribute of a module, or in a list there."""

    module: torch.nn.Module
    name: str
    place: int | None = None
    """Its index in the list; None where the attribute is the scalar."""

    @property
    def _holder(self) -> Any:
        return vars(self.module) if self.place is None else vars(self.module).get(self.name)

    @property
    def value(self) -> torch.Tensor | None:
        """What the last forward left; None where that is no scalar with a graph."""
        holder, key = self._holder, self.name if self.place is None else self.place
        is_there = key in holder if isinstance(key, str) else isinstance(holder, list) and key < len(holder)
        return holder[key] if is_there and _is_scalar(holder[key]) else None

    def alias(self) -> torch.Tensor | None:
        """Put a view of the value in its place, and return the view."""
        value = self.value
        if value is not None:
            self._holder[self.name if self.place is None else self.place] = value = value.view_as(value)
        return value


def scalar_attributes(model: torch.nn.Module) -> list[ScalarAttribute]:
    """Return the attributes of a model's modules that hold scalars with a graph. FSDP1 keeps its weights so: none."""
    if any(isinstance(module, FSDP1) for module in model.modules()):
        return []
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            places = [place for place, each in enumerate(value) if _is_scalar(each)] if type(value) is list else []
            found += [ScalarAttribute(module, name, place) for place in ([None] if _is_scalar(value) else places)]
    return found


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a scalar tensor with a graph."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.grad_fn is not None
