# SPDX-License-Identifier: Apache-2.0
"""Norms noted while training: of ``.grad`` after each micro-batch's backward, and per parameter before the step.

Both are local numbers of this rank's shards. Nothing is communicated while nothing spikes; ranks add them up when
asked, at a spike. The steps of the running norm show about how large each micro-batch's own gradient is, so where to
look first. Past norms per parameter distinguish one exploding layer from a spike of the whole model.

The cost is timed on the device's clock, or as this thread's own time on a CPU: waiting for a place in the device's
queue, or for a core that others use, is no cost of tracking. Where it is too dear, less is read: first the norm of each
step instead of each backward, then of every second step, every fourth and so on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .gradients import GradientSpace
from .ranks import Ranks

logger = logging.getLogger(__name__)

_MAX_COST = 0.002  # of an update's time. Beyond it less is read
_NEGLIGIBLE_S = 0.002  # an update: less is no loss, and a device that waits for its host seems to take longer
_NUM_TRIALS = 3  # updates in which norms are read before their cost is judged


class _Watch:
    """Adds up the time that blocks of work take: on the device if it has events, else on the host."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._open: list[tuple[Any, Any]] = []

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Time this block, without waiting for the device."""
        event = _event_of(device)
        if event is None:
            started = time.thread_time()
            yield
            self._seconds += time.thread_time() - started
            return
        pair = event(enable_timing=True), event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._open.append(pair)

    @property
    def seconds(self) -> float:
        """Total of all blocks that the device has finished."""
        done = [pair for pair in self._open if pair[1].query()]
        self._open = [pair for pair in self._open if pair not in done]
        self._seconds += sum(begin.elapsed_time(end) for begin, end in done) / 1e3
        return self._seconds


def _event_of(device: torch.device) -> Any:
    """Return the device's event class; None if it has none."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device.type), "Event", None)


class SpikeNorms(NamedTuple):
    """The norms of a spike, over all shards and on the host; the same on every rank but for ``along``."""

    squares: torch.Tensor
    """Squared norm of each parameter's gradient, float64 (num_params,)."""
    increments: list[float] | None
    """An estimate of each micro-batch's own gradient, see :func:`increments_of`; None if a rank did not track."""
    history: torch.Tensor | None
    """Squared, per parameter, of earlier steps: float64 (steps, num_params), oldest first; None
    if there are fewer than two, or a rank did not track."""
    summed: list[float]
    """Other scalars, read together with the norms."""
    along: torch.Tensor
    """Scalars of this process alone that were."""
    more: list[torch.Tensor]
    """Other sums that were, of the caller's."""


class NormTracker:
    """Notes local squared norms during training, as long as that costs next to nothing.

    Args:
        window: optimizer steps whose norms per parameter are kept; 0 for none.
    """

    def __init__(self, window: int):
        self.is_on = True
        self.reads_backwards = True
        """Whether each micro-batch's norm is noted, so far."""
        self._period = 1
        """One step in this many is read where backwards are not: a power of two."""
        self._step = 0
        self._history: deque[tuple[int, torch.Tensor]] = deque(maxlen=window)
        """The number and the squared norms of steps. Ranks may read different ones, hence the number."""
        self._running: list[torch.Tensor] = []
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._watch = _Watch()
        self._update_started = 0.0
        self._update_seconds = 0.0
        self._num_updates = 0

    def begin_update(self) -> None:
        self._update_started = time.perf_counter()

    def end_update(self) -> None:
        """Read less from here on if what was read costs too much."""
        self._update_seconds += time.perf_counter() - self._update_started
        self._num_updates += 1
        cost, seconds = self.cost, self._watch.seconds / self._num_updates
        is_judged = self._num_updates >= _NUM_TRIALS * self._period
        if not self.is_on or not is_judged or cost <= _MAX_COST or seconds <= _NEGLIGIBLE_S:
            return
        if self.reads_backwards:
            logger.warning(
                "gradloc: noting each micro-batch's norm takes %.2f %% of an update, more than %.2f %%, so only the "
                "step's is noted: searches will be slower",
                100 * cost,
                100 * _MAX_COST,
            )
        else:
            self._period *= 2
        self.reads_backwards = False
        self._begin_trial()

    def begin_mini_batch(self) -> None:
        self._running = []

    def after_backward(self, space: GradientSpace) -> None:
        """Note the squared norms of what ``.grad`` has accumulated so far: no communication, no synchronisation."""
        if not self.is_on or not self.reads_backwards:
            return
        try:
            with self._watch.on(space.params[0].device):
                self._running.append(space.local_squares())
        except (torch.OutOfMemoryError, MemoryError):  # training itself has room
            self.is_on = False
            logger.warning("gradloc: there is no memory to note each micro-batch's norm, so that stops")

    def after_mini_batch(self, space: GradientSpace, clip_scale: float, loss_scale: float, is_spike: bool) -> None:
        """Remember the norms per parameter of a step that did not spike.

        Args:
            space: ``.grad`` holds ``clip_scale`` times the step's gradient.
            clip_scale: the factor that clipping applied; in (0, 1].
            loss_scale: the factor on the loss in the backward, and so on the running norms.
            is_spike: whether the step spiked.
        """
        self._step += 1
        if not self.is_on or is_spike or not self._history.maxlen or self._step % self._period:
            return
        if self._running:  # after the last micro-batch .grad was the step's gradient
            self._history.append((self._step, self._running[-1] / loss_scale**2))
            return
        with self._watch.on(space.params[0].device):
            self._history.append((self._step, space.local_squares().div_(clip_scale**2)))

    @property
    def cost(self) -> float:
        """The fraction of updates' time that tracking has taken since less was read, if it ever was."""
        return self._watch.seconds / self._update_seconds if self._update_seconds else 0.0

    def read(
        self,
        space: GradientSpace,
        ranks: Ranks,
        loss_scale: float = 1.0,
        summed: Sequence[torch.Tensor] = (),
        along: Sequence[torch.Tensor] = (),
        more: Callable[[], Sequence[torch.Tensor]] = list,
    ) -> SpikeNorms:
        """Read all that is known of a spike's norms by one reduction. All ranks call this together.

        Args:
            space: ``.grad`` holds the gradient.
            ranks: the data-parallel ranks.
            loss_scale: the factor on the loss in the backward, and so on the running norms.
            summed: further scalars, this process' parts.
            along: further scalars of this process alone.
            more: computes further tensors, this process' parts.
        """
        has_running = self.is_on and bool(self._running)
        period, is_missing = ranks.max([float(self._period), float(not has_running)])
        running = [] if is_missing else self._running
        known = [squares for number, squares in self._history if self.is_on and number % period == 0]
        count = int(-ranks.max([-float(len(known))])[0])  # all ranks have read the last so many of these
        known = known[-count:] if count > 1 else []

        def local() -> list[torch.Tensor]:
            squares, scalars = space.own_squares(), [*summed, *(each.sum() for each in running)]
            parts = [squares, *([torch.stack(known)] if known else []), *more()]
            return parts + [torch.stack([each.to(squares.device).double() for each in scalars])] if scalars else parts

        found = space.reduce_all(local, along)
        scalars = found[-2].tolist() if summed or running else []
        sizes = [size / loss_scale for size in increments_of(scalars[len(summed) :])]
        squares, *others, along_read = found
        history = others.pop(0) if known else None
        if summed or running:
            others.pop()
        return SpikeNorms(squares, sizes if running else None, history, scalars[: len(summed)], along_read, others)


def increments_of(totals: Sequence[float]) -> list[float]:
    """Estimate the norms of gradients that were added up, from the squared norm of ``.grad`` after each.

    With A the sum so far and g the next gradient, ||A + g||^2 - ||A||^2 = ||g||^2 + 2 <A, g>. So the root of the change
    is exact for orthogonal gradients, as independent ones nearly are. abs() because g may undo what came before, and
    then the running norm falls.
    """
    return [abs(after - before) ** 0.5 for before, after in zip([0.0, *totals], totals, strict=False)]


def median_size(tensors: Iterable[torch.Tensor]) -> float:
    """Return the median absolute value of all elements that are finite and not 0; 0 without any."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors]).abs()
    kept = flat[(flat > 0) & flat.isfinite()]
    return float(kept.median()) if len(kept) else 0.0
