# SPDX-License-Identifier: Apache-2.0
"""An event's micro-batches on the processes that replay it, which may be fewer or more than the run had."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..core.step import Details, Outputs
from .bundle import Bundle, Entry


def deal(bundle: Bundle, num_processes: int) -> list[list[Entry | None]]:
    """Which process replays which micro-batches: as in the run where there are as many processes and all is here.

    Returns:
        Per process its micro-batches, equally many for all: None fills up, since every process must take part in
        every forward and backward.
    """
    entries = sorted(bundle.layout, key=lambda entry: (entry.micro_batch, entry.rank))
    most = math.ceil(len(entries) / num_processes)
    dealt = [entries[process::num_processes] for process in range(num_processes)]
    return [[*mine, *[None] * (most - len(mine))] for mine in dealt]


class Replayed:
    """Mixed into an adapter's step, for a process that may hold fewer micro-batches than others."""

    places: list[Entry | None]
    """This process's micro-batches, from :func:`deal`."""
    _tick: Callable[[], Any]
    """Called after every forward."""

    def recall(self, micro_batch: int) -> None:
        """Restore the random state that the micro-batch was trained with, or a fixed one if it is unknown."""
        entry = self.places[micro_batch]
        if entry is None or entry.rng is None:
            torch.manual_seed(micro_batch)
        else:
            torch.set_rng_state(entry.rng)

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        mask = super().token_mask(micro_batch)
        return torch.zeros_like(mask) if self.places[micro_batch] is None else mask

    def details(self, micro_batch: int) -> Details:
        details = super().details(micro_batch)
        return replace(details, weights=details.weights * self.token_mask(micro_batch))

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        outputs = super().forward(micro_batch, needs_entropy)
        self._tick()
        return outputs

    def trained(self, micro_batch: int, loss: torch.Tensor, log_prob: torch.Tensor) -> None:
        """The backward of training's loss; a filler's runs the same collectives and adds nothing."""
        (loss if self.places[micro_batch] is not None else 0.0 * log_prob.sum()).backward()
        self._tick()
