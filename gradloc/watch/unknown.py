# SPDX-License-Identifier: Apache-2.0
"""Which tensor is the last hidden state h of a model that names neither its body nor its head.

The first forward with a graph shows it, or the two first.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from .models import innermost
from .outputs import has_rows_mixed
from .paths import has_channels_first, hidden_in, is_view, last_before_matrix, last_hidden, num_differentiable


class Choice(NamedTuple):
    """What is h from now on."""

    hidden: torch.Tensor | None
    """Its value in the present forward; None where the outputs that the loss uses are h together."""
    module: torch.nn.Module | None = None
    """Whose output it is; None where it is the input of the heads."""
    weight: torch.nn.Parameter | None = None
    """The weight of a head that is no module."""
    is_by_row: bool = False
    """Whether it is a picture or a video, (B, C, ..., W), of which a row is one position."""


class UnknownModel:
    """The calls in a forward of an unknown model, among whose tensors h is chosen."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.linear_calls: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []
        """Linear layers with their inputs and outputs, in the order of their calls."""
        self.part_calls: list[tuple[torch.nn.Module, torch.Tensor]] | None = None
        """All modules with their outputs; None where these are not needed."""
        self.handles: list[Any] = []
        """Of the hooks that note them."""

    def choose(self, module: torch.nn.Module, output: Any) -> Choice | None:
        """Choose h: the input of the last linear layer, the head, and of each with the same input.

        Where a part of the output's gradient passes by each of these, as with a head that is no module of its own, h is
        the model's output. Where that has no positions, as of a model that returns its loss, it is the last module's
        output that all but the head's gradient passes through.

        Returns:
            The choice; None where the next forward has to show :attr:`part_calls`, or nothing was found.
        """
        found, count = hidden_in(output), num_differentiable(output)
        if found is not None and found.requires_grad and not isinstance(self._model, FSDP1 | FSDPModule):
            hidden = self._before_head(found, count)
            if hidden is not None:
                return Choice(hidden)
            if found.dim() > 1 and count == 1:
                return Choice(found, module, is_by_row=found.dim() > 3 or has_channels_first(found))
            if self.part_calls is None:
                self.part_calls = []
                return None
            headless = last_before_matrix(found, self.part_calls)
            if headless is not None:
                body, hidden, weight = headless
                return Choice(hidden, body, weight)
            if count > 1:
                return Choice(None)
        return Choice(self.linear_calls[-1][1]) if self.linear_calls else None

    def _before_head(self, found: torch.Tensor, count: int) -> torch.Tensor | None:
        """Return the input of the last linear layer that all of the output's gradient passes through; None where there
        is none, or a row of the output is made of several of its rows."""
        hidden = last_hidden(found, self.linear_calls)
        if hidden is None or count != 1 or any(is_view(found, logits) for _, _, logits in self.linear_calls):
            return hidden
        return None if has_rows_mixed(found, hidden) else hidden

    @property
    def uncalled(self) -> list[torch.nn.Linear]:
        """Linear layers without a call, one of which may be a head whose weight a loss uses."""
        called = {part for part, *_ in self.linear_calls}
        parts = innermost(self._model).modules()
        return [part for part in parts if isinstance(part, torch.nn.Linear) and part not in called]
