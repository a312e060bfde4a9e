# SPDX-License-Identifier: Apache-2.0
"""Notice how a loop clips its gradient: by which of torch's functions, with which limit, and the norm before it.

Loops import ``clip_grad_norm_`` before a watch is made, so that function cannot be replaced. But at each call it looks
up the two functions that it is made of, and these can be: accelerate's, Lightning's and Trainers' clips call them, too.
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
_SAME_FACTOR = 0.01  # relative: factors on two parameters' gradients that count as one factor
_SUDDEN = 4.0  # times less than usual: as much as the smallest spike


@dataclass
class Clip:
    """One call of a clip function on parameters of the watched model."""

    params: Sequence[torch.nn.Parameter]
    limit: float
    """The limit on the norm, or with ``is_by_value`` on each element."""
    norm: Any
    """L2 norm of their gradient before the call, a scalar tensor; None where FSDP1 computed one of another order."""
    again: Callable[[], Any]
    """Clips what is in ``.grad`` now in the same way; returns the L2 norm before, None where ``norm`` is."""
    used: Any
    """The norm that the limit is on, of the clip's own order; None with ``is_by_value``."""

    @property
    def is_by_value(self) -> bool:
        return self.used is None

    def factor(self) -> float:
        """Return what the gradient was multiplied by; reads the device."""
        norm = float(plain(self.used))
        return min(1.0, self.limit / (norm + 1e-6)) if math.isfinite(norm) else math.nan


def plain(norm: Any) -> torch.Tensor:
    """Return a gradient norm as a plain scalar tensor; of a DTensor all processes call this together."""
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


class ClipTap:
    """The clips of one model's gradient: the norm before them, and the same clips again. ``owns`` says whether a
    parameter is the model's."""

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
        """Take the clips of a step, and return its gradient's norm before them: from these, else the one that is given,
        else from the gradient."""
        self.note_writes()
        self.calls, self.pending = self.pending, []
        raw, self._raw = self._raw, None
        self.replaced = None
        if given is not None and not self.calls:
            return given
        covered = {id(param) for call in self.calls for param in call.params}
        is_all = all(id(param) in covered for param in space.params if param.grad is not None)
        self._sees_all = bool(self.calls) and is_all
        self._own_limit, self.limit = None, math.inf
        if not self._sees_all:
            return torch.tensor(space.norm() if raw is None else self._norm_without_calls(space, raw))
        if len(self.calls) == 1 and not self.calls[0].is_by_value:
            self.limit = self.calls[0].limit
        norms = [space.norm() / call.factor() if call.norm is None else plain(call.norm) for call in self.calls]
        return self._joined([*map(torch.as_tensor, norms)])

    @torch.no_grad()
    def again(self, space: GradientSpace) -> torch.Tensor:
        """Clip what is in ``.grad`` as the loop clipped; returns the norm before."""
        if not self.calls:
            norm = space.norm()
            factor = self.own_factor(norm)
            if factor is not None:
                space.scale(factor)
            return torch.tensor(norm)
        l2_norm = torch.tensor(space.norm()) if any(call.norm is None for call in self.calls) else None
        self.is_off = True
        try:
            norms = [call.again() for call in self.calls]
        finally:
            self.is_off = False
        return self._joined([*map(plain, norms)]) if l2_norm is None else l2_norm

    def own_factor(self, norm: float) -> float | None:
        """Return the factor of a loop's own clip; None where none was seen."""
        return None if self._own_limit is None else min(1.0, self._own_limit / (norm + 1e-6))

    def _norm_without_calls(self, space: GradientSpace, raw: torch.Tensor) -> float:
        """Return the norm before clipping where the loop calls no clip function; notice a clip by code of its own.

        A clip by norm leaves norms at its limit, which those after the backward are not. Another, such as an adaptive
        one, leaves far less than usual.
        """

        def local() -> torch.Tensor:
            now = _squares(space)
            return torch.stack([torch.zeros_like(raw) if now is None else now.to(raw.device), raw])

        squares, squares_before = space.reduce(local)
        norm, norm_before = math.sqrt(float(squares.sum())), math.sqrt(float(squares_before.sum()))
        ratio = norm / norm_before if norm_before > 0 else 1.0
        last_norm, last_ratio = self._last
        self._last = norm, ratio
        usual = self.usual_ratio or min(ratio, 1.0)
        factors = (squares / squares_before)[squares_before > 0].sqrt()
        is_scaled = bool(factors.numel()) and float(factors.max()) <= (1 + _SAME_FACTOR) * float(factors.min())
        if ratio < 1 - _CLIPPED and math.isfinite(norm) and is_scaled:
            was_unclipped = abs(last_ratio - 1) <= _CLIPPED
            is_last_norm = abs(norm - last_norm) <= _CLIPPED * norm
            has_other_ratio = abs(ratio - last_ratio) > 10 * _CLIPPED * ratio
            is_at_known_limit = abs(norm - (self._known_limit or 0.0)) <= _CLIPPED * norm
            if was_unclipped or (is_last_norm and has_other_ratio) or is_at_known_limit:
                self._own_limit = self._known_limit = self.limit = norm
                return norm_before
        elif ratio < usual / _SUDDEN and math.isfinite(norm_before):
            self.replaced = squares_before
            return norm_before * usual
        self.usual_ratio = math.sqrt(usual * min(ratio, 1.0)) if ratio > 0 else self.usual_ratio
        return norm

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


def _note(params: Iterable[Any], make_clip: Callable[[list[Any]], Clip]) -> None:
    """Note a clip of these parameters, before it runs, in the tap of each model that has some of them."""
    params = list(params)
    for tap in list(_taps):
        own = [] if tap.is_off else [param for param in params if tap.owns(param)]
        if own:
            tap.note_writes()
            tap.pending.append(make_clip(own))


def _clip_and_note(
    clip: Callable[[list[Any], Any], Any],
    get_total_norm: Callable[..., Any],
    parameters: Any,
    limit: float,
    norm: Any = None,
    order: float = 2.0,
) -> Any:
    """Call ``clip`` with parameters and the norm of this order, or without a norm by value, and note the call."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def make_clip(own: list[Any]) -> Clip:
        def l2_norm(used: Any) -> Any:
            is_l2 = used is not None and order == 2.0
            return used if is_l2 else get_total_norm([param.grad for param in own if param.grad is not None])

        def clip_again() -> Any:
            grads = [param.grad for param in own if param.grad is not None]
            used_now = None if norm is None else get_total_norm(grads, order)
            l2_now = l2_norm(used_now)
            clip(own, used_now)
            return l2_now

        return Clip(own, float(limit), l2_norm(norm), clip_again, norm)

    _note(params, make_clip)
    clipped = clip(params, norm)
    for tap in list(_taps):
        if not tap.is_off and tap.pending:
            tap.note_writes(is_own=True)
    return clipped


def _install() -> None:
    """Replace torch's clip functions, once, by ones that note their calls; without a tap they do as before."""
    if getattr(clip_grad, "_gradloc", False):
        return
    clip_grad._gradloc = True  # type: ignore[attr-defined]
    get_total_norm, scale = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    by_value = clip_grad.clip_grad_value_
    fsdp1_clip = FSDP1.clip_grad_norm_

    @wraps(get_total_norm)
    def noted_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        _last_order[0] = float(norm_type)
        return get_total_norm(tensors, norm_type, *args, **kwargs)

    @wraps(scale)
    def noted_scale(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        def clip(params: list[Any], norm: Any) -> Any:
            return scale(params, max_norm, norm, *args, **kwargs)

        return _clip_and_note(clip, get_total_norm, parameters, max_norm, total_norm, _last_order[0])

    @wraps(by_value)
    def noted_by_value(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
        def clip(params: list[Any], _: Any) -> Any:
            return by_value(params, clip_value, *args, **kwargs)

        return _clip_and_note(clip, get_total_norm, parameters, clip_value)

    @wraps(fsdp1_clip)
    def noted_fsdp1(self: FSDP1, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        norm = fsdp1_clip(self, max_norm, norm_type)
        is_l2 = float(norm_type) == 2.0

        def make_clip(own: list[Any]) -> Clip:
            def clip_again() -> Any:
                norm_now = fsdp1_clip(self, max_norm, norm_type)
                return norm_now if is_l2 else None

            return Clip(own, float(max_norm), norm if is_l2 else None, clip_again, norm)

        _note(self.parameters(), make_clip)
        return norm

    FSDP1.clip_grad_norm_ = noted_fsdp1  # type: ignore[method-assign]
    for module in (clip_grad, torch.nn.utils):
        for ours in (noted_total_norm, noted_scale, noted_by_value):
            for name in (ours.__name__, ours.__name__.lstrip("_")):  # torch has some with and without the underscore
                if hasattr(module, name):
                    setattr(module, name, ours)
