# SPDX-License-Identifier: Apache-2.0
"""The tap on clipping: which of torch's clip functions a loop called, with which limit, and the norm before it.

Loops import ``clip_grad_norm_`` before a watch is made, so the function itself cannot be replaced. It finds the two
halves that it is made of by name at each call, and these can: accelerate's, Lightning's and Trainers' clips pass there.
FSDP1 has a method of its own.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from ..core.gradients import GradientSpace, squared_norms
from ..core.sharding import local_shard

_CLIPPED = 1e-3  # relative: norms that a loop's own clip leaves at its limit are this near to each other
_EVEN = 0.01  # relative: factors on two parameters' gradients that are one factor
_SUDDEN = 4.0  # times less than usual: as much as the smallest spike


@dataclass
class Clip:
    """One call of a clip function on parameters of the watched model."""

    params: Sequence[torch.nn.Parameter]
    limit: float
    """The limit on the norm, or with ``is_by_value`` on each element."""
    norm: Any
    """L2 norm of their gradient before the call, a scalar tensor."""
    again: Callable[[], Any]
    """Clips what is in ``.grad`` now in the same way; returns the norm before."""
    is_by_value: bool = False

    def factor(self) -> float:
        """Return what the gradient was multiplied by; reads the device."""
        norm = float(plain(self.norm))
        return min(1.0, self.limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan


def plain(norm: Any) -> torch.Tensor:
    """Return a gradient norm as a plain scalar tensor; of a DTensor all processes call this together."""
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


class ClipTap:
    """The clips of one model's gradient: the norm before them, and the same clips again.

    Args:
        owns: whether a parameter is one of the model's.
    """

    def __init__(self, owns: Callable[[Any], bool]):
        self.owns = owns
        self.pending: list[Clip] = []
        """Clips since the last step, in order."""
        self.calls: list[Clip] = []
        """Clips of the step that is looked into."""
        self.limit = math.inf
        """The limit on the norm, if there was just one clip; else inf."""
        self.is_off = False
        self._sees_all, self._last = False, (0.0, 0.0)
        self._own_limit: float | None = None
        self._known_limit: float | None = None
        """The limit of a clip by the loop's own code, once one was noticed."""
        self._raw: torch.Tensor | None = None
        self.usual_ratio: float | None = None
        """Usual ratio of the norm that the loop's own code leaves to the norm after the backward; None before the first
        such step."""
        self.replaced: torch.Tensor | None = None
        """Squared norms of the parameters' gradients after the backward, float64 (num_params,), where the loop's own
        code shrank the step's as no clip by norm does, and far more than usual; else None."""
        self.is_written: bool | None = None
        """Whether more than clips wrote to the gradient after the last backward, as far as torch counts writes; None
        where they are not followed."""
        self._followed: tuple[Sequence[torch.nn.Parameter], list[Any]] = ((), [])
        _install()
        _taps.add(self)

    def close(self) -> None:
        _taps.discard(self)

    def after_backward(self, space: GradientSpace) -> None:
        """Note the norm that a clip would begin with, where the loop's clips cannot be seen."""
        if not self._sees_all:
            self._raw = _squares(space)

    def follow_writes(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Begin to follow writes to these parameters' gradients, before a forward."""
        self.is_written, self._followed = False, (params, _writes_to(params))

    def end_backward(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether a backward wrote to these parameters' gradients, and follow the writes after it."""
        before = self._followed[1]
        self.follow_writes(params)
        return self._followed[1] != before

    def note_writes(self, is_own: bool = False) -> None:
        """Note whether the gradients were written to since the last call; ``is_own``: by a clip, which is known."""
        params, before = self._followed
        self._followed = params, _writes_to(params)
        if self.is_written is False and not is_own:
            self.is_written = self._followed[1] != before

    def take_engine(self, limit: float) -> None:
        """Take the step for one that its engine clips to this limit, after our check."""
        self.pending, self._raw, self._own_limit, self.limit = [], None, None, limit

    def norm(self, space: GradientSpace, given: torch.Tensor | None = None) -> torch.Tensor:
        """Take the clips of a step, and return its gradient's norm before them: from these, else from the gradient.

        Args:
            space: the trained parameters.
            given: the norm where no clip was seen, if it is known.
        """
        self.note_writes()
        self.calls, self.pending, raw, self._raw, self.replaced = self.pending, [], self._raw, None, None
        if given is not None and not self.calls:
            return given
        covered = {id(param) for call in self.calls for param in call.params}
        is_all = all(id(param) in covered for param in space.params if param.grad is not None)
        self._sees_all, self._own_limit, self.limit = bool(self.calls) and is_all, None, math.inf
        if not self._sees_all:
            return torch.tensor(space.norm() if raw is None else self._norm_without_clips(space, raw))
        if len(self.calls) == 1 and not self.calls[0].is_by_value:
            self.limit = self.calls[0].limit
        return self._joined([plain(call.norm) for call in self.calls])

    @torch.no_grad()
    def again(self, space: GradientSpace) -> torch.Tensor:
        """Clip what is in ``.grad`` as the loop clipped; returns the norm before."""
        if not self.calls:
            norm = space.norm()
            factor = self.own_factor(norm)
            if factor is not None:
                space.scale(factor)
            return torch.tensor(norm)
        self.is_off = True
        try:
            return self._joined([plain(call.again()) for call in self.calls])
        finally:
            self.is_off = False

    def own_factor(self, norm: float) -> float | None:
        """Return the factor of a loop's own clip; None where none was seen."""
        return None if self._own_limit is None else min(1.0, self._own_limit / (norm + 1e-6))

    def _norm_without_clips(self, space: GradientSpace, raw: torch.Tensor) -> float:
        """Return the norm, and notice a loop that clips by code of its own. A clip by norm leaves norms at its limit,
        which those after the backward are not. Another, such as an adaptive one, leaves far less than usual."""

        def local() -> torch.Tensor:
            now = _squares(space)
            return torch.stack([torch.zeros_like(raw) if now is None else now.to(raw.device), raw])

        squares = space.reduce(local)
        now, after_backward = (math.sqrt(float(part.sum())) for part in squares)
        (last_now, last_ratio), ratio = self._last, now / after_backward if after_backward > 0 else 1.0
        self._last, usual = (now, ratio), self.usual_ratio or min(ratio, 1.0)
        shrunk = (squares[0] / squares[1])[squares[1] > 0].sqrt()
        is_even = bool(shrunk.numel()) and float(shrunk.max()) <= (1 + _EVEN) * float(shrunk.min())
        if ratio < 1 - _CLIPPED and math.isfinite(now) and is_even:
            is_near = [abs(now - other) <= _CLIPPED * now for other in (last_now, self._known_limit or 0.0)]
            was_whole = abs(last_ratio - 1) <= _CLIPPED
            is_steady = is_near[0] and abs(ratio - last_ratio) > 10 * _CLIPPED * ratio
            if was_whole or is_steady or is_near[1]:
                self._own_limit = self._known_limit = self.limit = now
                return after_backward
        elif ratio < usual / _SUDDEN and math.isfinite(after_backward):
            self.replaced = squares[1]
            return after_backward * usual
        self.usual_ratio = math.sqrt(usual * min(ratio, 1.0)) if ratio > 0 else self.usual_ratio
        return now

    def _joined(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the clips' norms to one: of several on the same parameters the first counts."""
        if len(norms) == 1:
            return norms[0]
        seen: set[int] = set()
        squares = []
        for call, norm in zip(self.calls, norms, strict=True):
            if seen.isdisjoint(id(param) for param in call.params):
                squares.append(norm.double() ** 2)
            seen |= {id(param) for param in call.params}
        return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def _writes_to(params: Sequence[torch.nn.Parameter]) -> list[Any]:
    """Return which tensors are in ``.grad``, and how often each was written to."""
    return [(id(param.grad), None if param.grad is None else local_shard(param.grad)._version) for param in params]


def _squares(space: GradientSpace) -> torch.Tensor | None:
    """Return the squared norm of each parameter's gradient on this process, float64 (num_params,); None without any."""
    grads = [None if grad is None else local_shard(grad) for grad in space.counted(space.current())]
    return squared_norms(grads) if any(grad is not None for grad in grads) else None


_taps: "weakref.WeakSet[ClipTap]" = weakref.WeakSet()
_last_order: list[float] = [2.0]  # of the norm that torch's clip computed last


def _note(params: Iterable[Any], make: Callable[[list[Any]], Clip]) -> None:
    params = list(params)
    for tap in list(_taps):
        own = [] if tap.is_off else [param for param in params if tap.owns(param)]
        if own:
            tap.note_writes()
            tap.pending.append(make(own))


def _settle(clipped: Any) -> Any:
    """Return what a clip returned, after it wrote to gradients."""
    for tap in list(_taps):
        if not tap.is_off and tap.pending:
            tap.note_writes(is_own=True)
    return clipped


def _install() -> None:
    """Put ours around torch's functions, once in a process. Without a tap they do what they did."""
    if getattr(clip_grad, "_gradloc", False):
        return
    clip_grad._gradloc = True  # type: ignore[attr-defined]
    total_norm, scale, by_value = (
        clip_grad._get_total_norm,
        clip_grad._clip_grads_with_norm_,
        clip_grad.clip_grad_value_,
    )

    def seen(
        clip: Callable[[list[Any], Any], Any], parameters: Any, limit: float, norm: Any = None, order: float = 2.0
    ) -> Any:
        """Clip, and note it: by the norm of this order, or without a norm by value."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

        def made(own: list[Any]) -> Clip:
            def again() -> Any:
                found = total_norm([param.grad for param in own if param.grad is not None], order)
                clip(own, found)
                return found

            is_known = norm is not None and order == 2.0
            size = norm if is_known else total_norm([param.grad for param in own])
            return Clip(own, float(limit), size, again, is_by_value=norm is None)

        _note(listed, made)
        return _settle(clip(listed, norm))

    @wraps(total_norm)
    def seen_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **given: Any) -> Any:
        _last_order[0] = float(norm_type)
        return total_norm(tensors, norm_type, *args, **given)

    @wraps(scale)
    def seen_scale(parameters: Any, max_norm: float, norm: Any, *args: Any, **given: Any) -> Any:
        def clip(params: list[Any], found: Any) -> Any:
            return scale(params, max_norm, found, *args, **given)

        return seen(clip, parameters, max_norm, norm, _last_order[0])

    @wraps(by_value)
    def seen_by_value(parameters: Any, clip_value: float, *args: Any, **given: Any) -> Any:
        def clip(params: list[Any], _: Any) -> Any:
            return by_value(params, clip_value, *args, **given)

        return seen(clip, parameters, clip_value)

    for place in (clip_grad, torch.nn.utils):
        for ours in (seen_total_norm, seen_scale, seen_by_value):
            for name in (ours.__name__, ours.__name__.lstrip("_")):
                if hasattr(place, name):
                    setattr(place, name, ours)

    fsdp1_clip = FSDP1.clip_grad_norm_

    @wraps(fsdp1_clip)
    def seen_fsdp1(self: FSDP1, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        norm = fsdp1_clip(self, max_norm, norm_type)
        _note(self.parameters(), lambda own: Clip(own, float(max_norm), norm, lambda: fsdp1_clip(self, max_norm)))
        return norm

    FSDP1.clip_grad_norm_ = seen_fsdp1  # type: ignore[method-assign]
