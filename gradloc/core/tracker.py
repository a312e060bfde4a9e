# SPDX-License-Identifier: Apache-2.0
"""Norms noted while training: after each micro-batch's backward, and per parameter before the step.

Both are local numbers of this rank's shards, so nothing is communicated while nothing spikes; the sums over ranks are
taken when somebody asks, on a spike. How the running norm changes tells about how large each micro-batch's own gradient
is, and so where to look first. The last norms of many steps tell a layer that explodes alone from a spike of the whole
model.
"""

import time
from collections import deque
from collections.abc import Iterable

import torch

from .gradients import GradientSpace, is_slow
from .ranks import Ranks

__all__ = ["NormTracker", "median_size"]

_MAX_COST = 0.002  # of an update's time: beyond, norms of layers wait, and the running norm switches itself off
_NUM_TRIALS = 3  # updates to judge that by


class NormTracker:
    """Notes local squared norms as training goes, as long as that costs next to nothing.

    Args:
        window: how many optimizer steps of per-parameter norms to keep; 0 keeps none.
    """

    def __init__(self, window: int):
        self.is_on = True
        self._history: deque[tuple[int, torch.Tensor]] = deque(maxlen=window)
        """By the number of the step; where it takes its time, each rank leaves out other ones."""
        self._num_steps = 0
        self._running: list[torch.Tensor] = []
        self._seconds = self._layer_seconds = 0.0
        self._update_started = 0.0
        self._update_seconds = 0.0
        self._num_updates = 0

    def begin_update(self) -> None:
        self._update_started = time.perf_counter()

    def end_update(self) -> None:
        """Stop tracking when the running norm costs more than the bound; later updates then pay nothing."""
        self._update_seconds += time.perf_counter() - self._update_started
        self._num_updates += 1
        if self._num_updates >= _NUM_TRIALS and self._seconds > _MAX_COST * self._update_seconds:
            self.is_on = False

    def begin_mini_batch(self) -> None:
        self._running = []

    def after_backward(self, space: GradientSpace) -> None:
        """Note the norms of what ``.grad`` has accumulated so far: no communication, no synchronisation.

        Roughly on a CPU, where reading all of a gradient takes its time.
        """
        if not self.is_on:
            return
        started = time.perf_counter()
        self._running.append(space.local_squares(self._is_rough(space)))
        self._seconds += time.perf_counter() - started

    def after_mini_batch(self, space: GradientSpace, clip_scale: float, loss_scale: float, is_spike: bool) -> None:
        """Remember the per-parameter norms of a step that did not spike; of one in so many, where that takes its time.

        Args:
            space: ``.grad`` holds ``clip_scale`` times the step's gradient.
            clip_scale: the factor that clipping applied; in (0, 1].
            loss_scale: what the loss was multiplied by in the backward.
            is_spike: whether the step spiked.
        """
        self._num_steps += 1
        if not self.is_on or is_spike or not self._history.maxlen:
            return
        started = time.perf_counter()
        if self._running and not self._is_rough(space):  # the last micro-batch's reading is the step's
            self._history.append((self._num_steps, self._running[-1] / loss_scale**2))
        elif self.cost(started) <= _MAX_COST:
            self._history.append((self._num_steps, space.local_squares().div_(clip_scale**2)))
        self._layer_seconds += time.perf_counter() - started

    def cost(self, now: float) -> float:
        """The part of all updates' time that tracking has taken, at this reading of the clock."""
        return (self._seconds + self._layer_seconds) / (self._update_seconds + now - self._update_started)

    @staticmethod
    def _is_rough(space: GradientSpace) -> bool:
        return is_slow(space.params[0].device)

    def increments(self, space: GradientSpace, ranks: Ranks, loss_scale: float) -> list[float] | None:
        """About how large each micro-batch's own gradient is, over all ranks; None when some rank did not track.

        The root of the change of the running squared norm: exact where the micro-batch's gradient is orthogonal to
        what came before, as independent ones nearly are.
        """
        if not ranks.all(self.is_on and bool(self._running)):
            return None
        totals = space.reduce(lambda: torch.stack([squares.sum() for squares in self._running]).double())
        running = [0.0, *(total / loss_scale**2 for total in totals.tolist())]
        return [abs(after - before) ** 0.5 for before, after in zip(running[:-1], running[1:], strict=True)]

    def history(self, space: GradientSpace, ranks: Ranks) -> torch.Tensor | None:
        """Squared norm per parameter of the steps that all ranks remember: float64 (steps, num_params).

        None where these are fewer than two.
        """
        if not ranks.all(self.is_on and len(self._history) > 1):
            return None
        squares = dict(self._history)
        (oldest,) = ranks.max([float(min(squares))])
        numbers = range(int(oldest), self._num_steps + 1)
        missing = ranks.max([float(number not in squares) for number in numbers])
        known = [squares[number] for number, is_missing in zip(numbers, missing, strict=True) if not is_missing]
        return space.reduce(lambda: torch.stack(known).double()) if len(known) > 1 else None


def median_size(tensors: Iterable[torch.Tensor]) -> float:
    """Median of the absolute values of all elements that are neither zero nor NaN; 0 without any."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).abs()
    kept = flat[(flat > 0) & flat.isfinite()]
    return float(kept.median()) if len(kept) else 0.0
