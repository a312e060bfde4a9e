# SPDX-License-Identifier: Apache-2.0
"""A step as a search reads it: per-token tensors are copied to the host once.

Shapes: B rows of the micro-batch, T response positions.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .step import ByRow, Details, LossReplay, Outputs, Recorded, Scheduled, TrainingStep, kl_coefficients


def to_host(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copy tensors to the host by a single read per device: copying one by one would wait for it each time."""
    copied: list[torch.Tensor | None] = [None] * len(tensors)
    known = {
        index: (tensor.detach() if tensor.requires_grad else tensor).contiguous()
        for index, tensor in enumerate(tensors)
        if tensor is not None
    }
    for device in {tensor.device for tensor in known.values()}:
        given = {index: tensor for index, tensor in known.items() if tensor.device == device}
        order = sorted(given, key=lambda index: -given[index].element_size())  # largest first: all stay aligned
        flat = [given[index].as_strided((given[index].numel(),), (1,)) for index in order]  # one element has any stride
        if len({tensor.dtype for tensor in flat}) > 1:
            flat = [tensor.view(torch.uint8) for tensor in flat]
        parts = torch.cat(flat).cpu().split([tensor.numel() for tensor in flat])
        for index, part in zip(order, parts, strict=True):
            copied[index] = part.view(given[index].dtype).view(given[index].shape)
    return copied


class HostStep:
    """A step whose per-token tensors are on the host; all other attributes are the step's own.

    Masks, records and details of all micro-batches are read together when the first is asked for, the outputs of a
    forward with that forward. Nothing else waits for the device.

    Args:
        step: the trainer's.
        device: where its model is.
        num_ranks: data-parallel ranks.
    """

    def __init__(self, step: TrainingStep, device: torch.device, num_ranks: int = 1):
        self._step, self._device, self._num_ranks = step, device, num_ranks
        self._held: dict[str, list[Any]] = {}
        self._unit = 1.0
        self.is_scheduled = isinstance(step, Scheduled)
        self.is_by_row = isinstance(step, ByRow) and not self.is_scheduled
        self.has_own_loss = isinstance(step, LossReplay) and step.knows_loss
        if isinstance(step, Scheduled):
            step.distribute_records()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self._gathered("token_mask")[micro_batch]

    def recorded(self, micro_batch: int) -> Recorded:
        return self._gathered("recorded")[micro_batch]

    def rows(self, micro_batch: int) -> list[int]:
        """Return the rows' numbers in the driver's batch, which are read once."""
        if "rows" not in self._held:
            self._held["rows"] = [self._step.rows(index) for index in range(self._step.num_micro_batches)]
        return self._held["rows"][micro_batch]

    def coefficients(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return :meth:`.step.Recorded.coefficients` in the present unit, on the host."""
        if "coefficients" not in self._held:
            records, weight = self._gathered("recorded"), self.weight / self._unit
            self._held["coefficients"] = [each.coefficients(weight) for each in records]
        return self._held["coefficients"][micro_batch]

    def rescale(self, unit: float) -> None:
        """Divide all coefficients by this power of two from now on; 1 restores training's unit."""
        self._unit = unit
        self._held.pop("coefficients", None)

    def details(self, micro_batch: int) -> Details:
        """Return :meth:`.step.TrainingStep.details` on the host."""
        return self._gathered("details")[micro_batch]

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        """Return each token's weight in the loss (B, T); where the trainer has none, as in a mean over all tokens."""
        weights = self.details(micro_batch).weights
        if weights is None:
            masks = self._gathered("token_mask")
            weights = masks[micro_batch] / max(sum(int(mask.sum()) for mask in masks) * self._num_ranks, 1)
        return weights

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        if "kl" not in self._held:
            self._held["kl"] = to_host([kl_coefficients(self._step, i) for i in range(self._step.num_micro_batches)])
        return self._held["kl"][micro_batch]

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        """Run the forward without a graph, with training's random numbers; outputs are on the host."""
        self._step.recorded(micro_batch).rng.restore()
        with torch.no_grad():
            log_prob, entropy, *_ = self._step.forward(micro_batch, needs_entropy)
        return Outputs(*to_host([log_prob, entropy]))  # type: ignore[arg-type]

    def forward_with_graph(self, rows: Sequence[tuple[int, list[int] | None]]) -> Outputs:
        """Run training's forward again, to run a backward from: of one micro-batch (its number and None), or of some
        rows if the step is :class:`.step.ByRow`. Outputs are on the device."""
        step: Any = self._step
        (micro_batch, chosen), *_ = rows
        step.recorded(micro_batch).rng.restore()
        return step.forward(micro_batch) if chosen is None else step.forward_rows(rows)

    def pull(self, micro_batch: int, selected: torch.Tensor | None) -> Any:
        """Return :meth:`.step.Recorded.pull` in the present unit, on the device."""
        selected = None if selected is None else selected.to(self._device)
        pull: Any = self._step.recorded(micro_batch).pull(selected)
        if not isinstance(pull, Outputs):
            return partial(pull, unit=self._unit)
        if self._unit == 1.0:
            return pull
        return Outputs(*(None if each is None else each / self._unit for each in pull))  # type: ignore[arg-type]

    def _gathered(self, name: str) -> list[Any]:
        if name not in self._held:
            names = "token_mask", "recorded", "details"
            values = {each: [getattr(self._step, each)(i) for i in range(self.num_micro_batches)] for each in names}
            self._held |= _on_host(values)
        return self._held[name]


def _on_host(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Copy every tensor of these values, which are tensors or dataclasses with tensors, to the host."""

    def tensors_of(value: Any) -> dict[str, torch.Tensor]:
        named = {"": value} if isinstance(value, torch.Tensor) else vars(value)
        return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}

    read = iter(
        to_host([each for each_list in values.values() for value in each_list for each in tensors_of(value).values()])
    )

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(read)
        on_host = copy.copy(value)
        vars(on_host).update({name: next(read) for name in tensors_of(value)})
        return on_host

    return {name: [copied(value) for value in each] for name, each in values.items()}
