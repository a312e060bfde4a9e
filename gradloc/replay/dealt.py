# SPDX-License-Identifier: Apache-2.0
"""An event's micro-batches on the processes that replay it, which may be fewer or more than the run had."""

from collections.abc import Callable
from typing import Any

import torch

from .bundle import Bundle, Entry


def deal(bundle: Bundle, num_processes: int) -> list[list[Entry | None]]:
    """Which process replays which micro-batches: the run's own layout where it fits, else one after the other.

    Returns:
        Per process its micro-batches, equally many for all: None fills up, since every process must take part in
        every forward and backward.
    """
    by_rank: list[list[Entry | None]] = [[] for _ in range(num_processes)]
    entries = sorted(bundle.layout, key=lambda entry: (entry.micro_batch, entry.rank))
    numbers = [[e.micro_batch for e in entries if e.rank == rank] for rank in range(bundle.dp_size)]
    keeps_layout = num_processes == bundle.dp_size and all(of_rank == numbers[0] for of_rank in numbers)
    for number, entry in enumerate(entries):
        by_rank[entry.rank if keeps_layout else number % num_processes].append(entry)
    most = max(len(of_process) for of_process in by_rank)
    return [of_process + [None] * (most - len(of_process)) for of_process in by_rank]


class Replayed:
    """In front of an adapter's step: a replay's process may hold fewer micro-batches than others."""

    places: list[Entry | None]
    """This process's micro-batches, from :func:`deal`."""
    _tick: Callable[[], Any]
    """Called after every forward."""

    def recall(self, micro_batch: int) -> None:
        """Put back the random state that the micro-batch was trained with; a fixed one where it is not known."""
        entry = self.places[micro_batch]
        if entry is None or entry.rng is None:
            torch.manual_seed(micro_batch)
        else:
            torch.set_rng_state(entry.rng)

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        mask = super().token_mask(micro_batch)
        return torch.zeros_like(mask) if self.places[micro_batch] is None else mask

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        return super().token_weights(micro_batch) * self.token_mask(micro_batch)

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = super().forward(micro_batch)
        self._tick()
        return found

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        if self.places[micro_batch] is None:  # runs the same collectives and adds nothing
            selected = self.token_mask(micro_batch)
        loss = super().loss(micro_batch, selected)
        self._tick()
        return loss
