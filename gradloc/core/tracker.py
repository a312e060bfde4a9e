# SPDX-License-Identifier: Apache-2.0
"""Norms noted while training: after each micro-batch's backward, and per parameter before the step.

Both are local numbers of this rank's shards, so nothing is communicated while nothing spikes; the sums over ranks are
taken when somebody asks, on a spike. How the running norm changes tells about how large each micro-batch's own gradient
is, and so where to look first. The last norms of many steps tell a layer that explodes alone from a spike of the whole
model.

What that costs is timed by the device's own clock: the host, which runs ahead of it, may wait for a place in its queue.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .gradients import GradientSpace, is_slow
from .ranks import Ranks

logger = logging.getLogger(__name__)

_MAX_COST = 0.002  # of an update's time: beyond, norms of layers wait, and the running norm switches itself off
_NUM_TRIALS = 3  # updates to judge that by


class _Watch:
    """Adds up the time that blocks of work take: of the device where it has events, else of the host."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: list[tuple[Any, Any]] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Time what is in here; waits for nothing."""
        event = _event_of(device)
        if event is None:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        pair = event(enable_timing=True), event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._open.append(pair)

    @property
    def seconds(self) -> float:
        """Of all blocks that the device has come to the end of."""
        done = [pair for pair in self._open if pair[1].query()]
        self._open = [pair for pair in self._open if pair not in done]
        self._seconds += sum(begin.elapsed_time(end) for begin, end in done) / 1e3
        return self._seconds


def _event_of(device: torch.device) -> Any:
    """The class of a device's events; None where it has none."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device.type), "Event", None)


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
        self._watch, self._layer_watch = _Watch(), _Watch()
        self._update_started = 0.0
        self._update_seconds = 0.0
        self._num_updates = 0

    def begin_update(self) -> None:
        self._update_started = time.perf_counter()

    def end_update(self) -> None:
        """Stop tracking when the running norm costs more than the bound; later updates then pay nothing."""
        self._update_seconds += time.perf_counter() - self._update_started
        self._num_updates += 1
        cost = self._watch.seconds / self._update_seconds
        if self.is_on and self._num_updates >= _NUM_TRIALS and cost > _MAX_COST:
            self.is_on = False
            logger.warning(
                "gradloc: noting each micro-batch's norm takes %.2f %% of an update, more than %.2f %%, so it stops: a "
                "search does not know any more where to look first",
                100 * cost,
                100 * _MAX_COST,
            )

    def begin_mini_batch(self) -> None:
        self._running = []

    def after_backward(self, space: GradientSpace) -> None:
        """Note the norms of what ``.grad`` has accumulated so far: no communication, no synchronisation.

        Roughly on a CPU, where reading all of a gradient takes its time.
        """
        if not self.is_on:
            return
        with self._watch.on(space.params[0].device):
            self._running.append(space.local_squares(self._is_rough(space)))

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
        with self._layer_watch.on(space.params[0].device):
            if self._running and not self._is_rough(space):  # the last micro-batch's reading is the step's
                self._history.append((self._num_steps, self._running[-1] / loss_scale**2))
            elif self.cost(time.perf_counter()) <= _MAX_COST:
                self._history.append((self._num_steps, space.local_squares().div_(clip_scale**2)))

    def cost(self, now: float) -> float:
        """The part of all updates' time that tracking has taken, at this reading of the clock."""
        return (self._watch.seconds + self._layer_watch.seconds) / (self._update_seconds + now - self._update_started)

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
