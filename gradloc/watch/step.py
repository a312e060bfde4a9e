# SPDX-License-Identifier: Apache-2.0
"""Base of steps that are run again from a model's inputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..core.sharding import reduction_deferred
from ..core.step import TrainingStep
from .taps import ModelTap


class LoopStep(TrainingStep):
    """Forwards of one optimizer step that the taps saw; its micro-batches each have ``forwarded``.

    Args:
        tap: on the model.
        num_ranks: processes that the gradient is averaged over.
        backward_factor: see :class:`~..core.step.TrainingStep`.
    """

    around_pass: Callable[[bool], AbstractContextManager[None]] | None = None
    """An engine's own, around a micro-batch of a pass; called with whether it is the last."""

    def __init__(self, tap: ModelTap, num_ranks: int, backward_factor: float = 1.0):
        super().__init__(tap.device, num_ranks, backward_factor)
        self.tap, self.module, self.around_pass = tap, tap.outer, tap.around_pass

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        found = self.micro_batches[0].forwarded.dtype
        return torch.float32 if found == torch.float64 else found  # no search reckons with finer

    @property
    def reduces_once(self) -> bool:
        return any(each.forwarded.is_deferred for each in self.micro_batches[:-1])

    @property
    def is_stale(self) -> bool:
        """Whether an input was written to since."""
        return any(each.forwarded.is_changed for each in self.micro_batches)

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        if self.around_pass is not None:
            return self.around_pass(is_last)
        return reduction_deferred(self.module) if self.reduces_once and not is_last else nullcontext()
