# SPDX-License-Identifier: Apache-2.0
"""Follow scalars of a forward that do not depend on the last hidden state, such as routers' balancing losses.

A model returns them, or leaves them in attributes of its modules, where the loss reads them. So each has one
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
        """Indices of the scalars among the output's tensors."""
        self.attributes: list[ScalarAttribute] = []

    def __len__(self) -> int:
        return len(self.places) + len(self.attributes)

    def hook(self, present: RecordedForward, index: int, value: torch.Tensor) -> None:
        """Keep the gradient of the scalar with this index in the forward's ``model_auxiliary``, (K,) of K scalars."""
        value.register_hook(partial(self._keep, present, index))

    def hook_attributes(self, present: RecordedForward) -> None:
        """Hook aliases of the attributes: the model may have used the values themselves."""
        for index, attribute in enumerate(self.attributes, len(self.places)):
            if (value := attribute.alias()) is not None:
                self.hook(present, index, value)

    def stacked(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the values (K,) of the last forward, whose output has these tensors; None where one is missing, or
        there is none."""
        values = [leaves[place] for place in self.places if place < len(leaves)]
        values += [value for attribute in self.attributes if (value := attribute.value) is not None]
        return torch.stack(values) if values and len(values) == len(self) else None

    def _keep(self, present: RecordedForward, index: int, grad: torch.Tensor) -> None:
        coefficients = grad.new_zeros(len(self))
        coefficients[index] = grad
        present.add("model_auxiliary", coefficients)


class ScalarAttribute(NamedTuple):
    """A scalar with a graph that forwards leave in an attribute of a module, or in a list there."""

    module: torch.nn.Module
    name: str
    item: int | None = None
    """The scalar's index in the list; None where the attribute is the scalar."""

    @property
    def value(self) -> torch.Tensor | None:
        """The value that the last forward left; None where that is no scalar with a graph."""
        value = vars(self.module).get(self.name)
        if self.item is not None:
            value = value[self.item] if isinstance(value, list) and self.item < len(value) else None
        return value if _is_scalar(value) else None

    def alias(self) -> torch.Tensor | None:
        """Replace the value by a view of it, and return the view."""
        value = self.value
        if value is None:
            return None
        view, attributes = value.view_as(value), vars(self.module)
        if self.item is None:
            attributes[self.name] = view
        else:
            attributes[self.name][self.item] = view
        return view


def scalar_attributes(model: torch.nn.Module) -> list[ScalarAttribute]:
    """Return the attributes of a model's modules that hold scalars with a graph; none under FSDP1.

    FSDP1 leaves its weights in attributes, and these have a graph.
    """
    if any(isinstance(module, FSDP1) for module in model.modules()):
        return []
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if _is_scalar(value):
                found.append(ScalarAttribute(module, name))
            elif type(value) is list:
                found += [ScalarAttribute(module, name, index) for index, each in enumerate(value) if _is_scalar(each)]
    return found


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a scalar tensor with a graph."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.grad_fn is not None
