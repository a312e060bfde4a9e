# SPDX-License-Identifier: Apache-2.0
"""A training forward that can be run again: references to its inputs, and what its backward left.

Shapes: B rows, T positions, H hidden size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from ..core.forward_state import RngState
from ..core.sharding import compute_dtype, is_reduction_deferred
from ..core.step import Outputs, Recorded

_WITH_NAN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Place(NamedTuple):
    """Which rows of h (B, T, H) a view of it holds."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """From h's own, in elements."""

    @classmethod
    def whole(cls, shape: torch.Size) -> "Place":
        """Return the place of all of h."""
        return cls(tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), 0)

    @classmethod
    def find(cls, view: torch.Tensor, hidden: torch.Tensor) -> "Place":
        """Return where a view of h lies in it."""
        if (view.shape, view.stride()) == (hidden.shape, hidden.stride()):
            return cls.whole(view.shape)
        if not hidden.is_contiguous():  # (B, T, H), stored as the view is: (T, B, H)
            (length, rows, size), width = view.shape, hidden.shape[1]
            return cls((length, rows, size), (size, width * size, 1), 0)
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - hidden.storage_offset()))

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the number in B x T of each of its rows."""
        found = torch.tensor(self.offset, device=device)
        for size, stride in zip(self.size[:-1], self.strides[:-1], strict=True):
            found = found.unsqueeze(-1) + torch.arange(size, device=device) * stride
        return found // self.size[-1]


@dataclass
class HeadCall:
    """One call of a head on h, or on some of its rows."""

    head: Any
    """A module with a ``weight``."""
    place: Place
    logit_grad: torch.Tensor | None = None
    """dL/dz; None where it was too large to keep."""
    output: torch.Tensor | None = None
    """z; None unless :attr:`.taps.ModelTap.keeps_logits` was set."""


class StageTokens(NamedTuple):
    """The tokens whose gradient a backward lets through."""

    is_low: torch.Tensor
    """bool (B, T), or (B, T - 1) where the last position predicts nothing."""
    takes_low: bool

    def factor(self, positions: tuple[int, int]) -> torch.Tensor:
        """Return which positions are in the stage, bool (B, T). Of logits that are one longer the last is not.

        Raises:
            ValueError: where the stage's tokens have another shape than the model's positions.
        """
        rows, width = positions
        missing, shape = width - self.is_low.shape[1], tuple(self.is_low.shape)
        if len(self.is_low) != rows or missing not in (0, 1):
            raise ValueError(f"the stage's old_log_probs are {shape}, the model's positions {positions}")
        is_low = torch.nn.functional.pad(self.is_low, (0, missing))
        return is_low if self.takes_low else ~is_low


class RecordedForward:
    """One training forward: the module's call that :class:`.taps.ModelTap` saw, and what its backward left."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tap: Any):
        self.module = module
        self.args, self.kwargs = tree_map(_without_graph, (args, kwargs))
        self._versions = [(leaf, leaf._version) for leaf in self._inputs() if not leaf.is_inference()]
        self.rng = RngState(tap.device, tap.generators)
        self._state = tap.moving.before_forward(tap.outer)
        self.autocast, dtype = autocast_now(tap.device)
        self.dtype = dtype or compute_dtype(tap.outer)
        self.is_deferred = is_reduction_deferred(tap.outer)
        self.again: Callable[[], Any] | None = None
        """A loop's own function, where part of the loss is made in it."""
        self.shape: torch.Size | None = None
        """The shape of the hidden state."""
        self.is_by_row = False
        """Whether each row of h is one position, such as an image."""
        self.is_passed_by = False
        """Whether a backward came to an output of the model that does not come from the hidden state alone."""
        self.is_done = False
        """Whether a backward came to its hidden state."""
        self.is_counted = False
        """Whether such a backward left a gradient in the model's parameters."""
        self.recorded: Recorded | None = None
        """The record of the log-probs that the model returned and their derivatives; None where it returned none."""
        self.hidden_grad: Any = None
        """dL/dh, of h's own shape, on the device or the host; None before the backward, and with log-probs."""
        self.norms: Any = None
        """Norm of dL/dh at each position, float32 (B, T); None as :attr:`hidden_grad`."""
        self.head_calls: list[HeadCall] = []
        self.is_body_alone = False
        """Whether the loop called the body by itself, and then the heads."""
        self.is_head_inlined = False
        """Whether the head's weight was used without a call of the head, as fused losses do."""
        self.model_auxiliary: torch.Tensor | None = None
        """dL / d (the model's own auxiliary loss), a scalar, or (K,) of K scalars among its outputs."""
        self.declared_auxiliary: torch.Tensor | None = None
        """dL / d (the loss that the loop says passes through no hidden state), a scalar; it may hold the model's."""
        self.coefficient: torch.Tensor | None = None
        """dL / d log_prob (B, T), where the loop gave its log-probs."""
        self.known: dict[str, Any] = {}
        """The loop's notes on this forward."""
        self.stage: StageTokens | None = None
        self.factor: torch.Tensor | None = None
        """Lopti's stage, bool (B, T): the positions whose gradient the backward lets through; None for all."""

    def _inputs(self) -> Iterator[torch.Tensor]:
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))

    @property
    def has_log_probs(self) -> bool:
        """Whether the loss is made of the log-probs that the model returned."""
        return self.recorded is not None and self.recorded.log_prob_coefficient is not None

    @property
    def auxiliary_coefficient(self) -> torch.Tensor | None:
        """dL / d (the part of the loss that passes through no hidden state), a scalar."""
        return self.model_auxiliary if self.again is None else self.declared_auxiliary

    @property
    def is_changed(self) -> bool:
        """Return whether an input was written to since the forward."""
        return any(leaf._version != version for leaf, version in self._versions)

    def run(self, left_out: torch.Tensor | None = None) -> Any:
        """Run it again, at the present weights and random state, and with the attributes that it began with.

        Args:
            left_out: bool (B, T), positions that have no part in the gradient. Inputs that are not finite there are 0,
                since a NaN that is multiplied by 0 is one.
        """
        self._state.restore()
        args, kwargs = self.args, self.kwargs
        if left_out is not None:
            args, kwargs = tree_map(partial(_finite_at, left_out), (args, kwargs))
        with self.autocast():
            torch.clear_autocast_cache()  # weights may have moved since it was filled
            return self.module(*args, **kwargs) if self.again is None else self.again()

    def broken_inputs(self) -> torch.Tensor:
        """Return how many values of each row's inputs are NaN or infinite, int64 (B, 1), on the host."""
        found = torch.zeros(self.positions[0], 1, dtype=torch.long)
        for leaf in self._inputs():
            if _position_dims(leaf, self.positions):
                found += _is_broken(leaf).reshape(len(found), leaf[0].numel()).sum(1, keepdim=True).cpu()
        return found

    def ids(self) -> list[torch.Tensor]:
        """Return the inputs that may be token ids or labels: integers with one for each position."""
        size = self.positions
        plain = [leaf for leaf in self._inputs() if not leaf.is_nested]
        found = [leaf for leaf in plain if leaf.dim() == 2 and tuple(leaf.shape) == size]
        integers = [leaf for leaf in found if not (leaf.is_floating_point() or leaf.dtype == torch.bool)]
        named = [self.kwargs[name] for name in ("labels", "input_ids") if name in self.kwargs]
        return sorted(integers, key=lambda leaf: not any(leaf is each for each in named))

    @property
    def size(self) -> tuple[int, ...]:
        """(B, T): T is the number of a row's log-probs, or its positions until these are known."""
        return self.positions if self.recorded is None else tuple(self.recorded.log_prob.shape)

    @property
    def positions(self) -> tuple[int, int]:
        """(B, T): a vector for each row counts as one position, a grid of vectors as a sequence, and a vector without
        rows as one row."""
        assert self.shape is not None
        num_rows = self.shape[0] if len(self.shape) > 1 else 1
        return (num_rows, 1 if self.is_by_row else math.prod(self.shape[1:-1]))

    def drop_backward(self) -> None:
        """Forget what backwards left."""
        self.is_done = self.is_passed_by = False
        self.hidden_grad = self.norms = self.coefficient = self.model_auxiliary = self.declared_auxiliary = None
        for call in self.head_calls:
            call.logit_grad = None

    def add(self, name: str, grad: torch.Tensor) -> None:
        """Add what a backward left to an attribute; another backward may have come through the same forward."""
        before, grad = getattr(self, name), detached(grad)
        setattr(self, name, grad if before is None else before + grad)


def _position_dims(leaf: Any, positions: tuple[int, int]) -> int:
    """Return how many of an input's dimensions number its positions: 2 for (B, T, ...), 1 for (B, ...); 0 where it has
    no values of its own for a row."""
    is_plain = type(leaf) is torch.Tensor and not leaf.is_nested and leaf.dtype in _WITH_NAN
    if not is_plain:
        return 0
    return 2 if tuple(leaf.shape[:2]) == positions else int(leaf.shape[:1] == positions[:1])


def _finite_at(left_out: torch.Tensor, leaf: Any) -> Any:
    """Return an input with 0 for what is not finite at these positions."""
    where = _position_dims(leaf, tuple(left_out.shape))  # type: ignore[arg-type]
    if not where:
        return leaf
    chosen = left_out if where == 2 else left_out.all(1)
    chosen = chosen.to(leaf.device).reshape(*chosen.shape, *[1] * (leaf.dim() - where))
    return torch.where(chosen & _is_broken(leaf), 0.0, leaf)


def _is_broken(leaf: torch.Tensor) -> torch.Tensor:
    """Return where an input is NaN or infinite; attention masks hold -inf."""
    return leaf.isnan() | leaf.isposinf()


def _without_graph(leaf: Any) -> Any:
    """Return an input without the graph that it came with, which training's backward frees."""
    has_graph = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    return leaf.detach() if has_graph else leaf


def detached(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient without a graph, which it has in a double backward."""
    return grad.detach() if grad.requires_grad else grad


def count_backward(done: list[RecordedForward], has_gradient: bool) -> bool:
    """Count the backward that just ended, or drop it where it is no part of the step, and return whether it is one.

    Args:
        done: forwards whose hidden state it, or an earlier one, came to.
        has_gradient: whether it left a gradient in the model's parameters: ``torch.autograd.grad`` does not, as for a
            gradient penalty.
    """
    for each in done:
        if not has_gradient and not each.is_counted and each.recorded is None:
            each.drop_backward()
        each.is_counted = each.is_counted or has_gradient
    return has_gradient


class Graph:
    """The outputs of a forward that was run again with a graph."""

    def __init__(self, is_cut_behind_heads: bool) -> None:
        self.is_cut_behind_heads = is_cut_behind_heads
        """Whether no gradient flows into the heads' outputs from what the model makes of them."""
        self.hidden: torch.Tensor | None = None
        self.cut: torch.Tensor | None = None
        """The hidden state as the rest of the forward gets it."""
        self.heads: list[torch.Tensor] = []
        """The output of each call of a head, in their order."""
        self.auxiliary: torch.Tensor | None = None
        self.given: Any = None
        """The model's output."""
        self.anchors: list[torch.Tensor] = []
        """Tensors that the model returned: FSDP prepares its backward by hooks there."""

    def backward(self, roots: list[torch.Tensor], grads: list[torch.Tensor], auxiliary: torch.Tensor | None) -> None:
        """Run backward from these roots, and from the auxiliary loss with this coefficient, None without one."""
        if self.auxiliary is not None and auxiliary is not None and self.auxiliary.requires_grad:
            roots.append(self.auxiliary)
            grads.append(auxiliary.to(self.auxiliary.dtype))
        if self.anchors:
            roots.append(_Zero.apply(*self.anchors))
            grads.append(torch.ones_like(roots[-1]))
        torch.autograd.backward(roots, grads)


class _Zero(torch.autograd.Function):
    """A scalar zero, whose backward reaches these tensors with zeros."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.like = [(value.shape, value.dtype, value.device) for value in values]
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.zeros((), dtype=d, device=v).expand(s) for s, d, v in ctx.like)


# ---- what a model, or a loop's own function, returns


def auxiliary_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a transformers model's output that passes through no hidden state: routers' balancing loss."""
    found = getattr(output, "aux_loss", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 0 else None


def returned_log_probs(output: Any) -> Outputs | None:
    """Return the log-probs (B, T) that a model's output has, its entropies and its auxiliary loss; None without any."""
    found = getattr(output, "log_probs", None)
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or not found.requires_grad and torch.is_grad_enabled():
        return None
    return Outputs(found, getattr(output, "entropy", None), auxiliary_loss(output))


Forward = Callable[[], Any]
"""Gives log-probs (B, T), or a tuple of these, entropies (B, T) or None, and a scalar of what else the loss is made of
or None."""


def frozen(forward: Forward) -> Forward:
    """Return the function with its variables' present values: a loop gives them others before it is run again."""
    if not isinstance(forward, FunctionType):
        return forward
    without_value = CellType()  # equal to any other whose variable has no value yet
    closure = forward.__closure__ or ()
    cells = tuple(cell if cell == without_value else CellType(cell.cell_contents) for cell in closure)
    available = forward.__globals__
    names = _names_in(forward.__code__) | {"__name__", "__builtins__"}
    used = {name: available[name] for name in names if name in available}
    copied = FunctionType(forward.__code__, used, forward.__name__, forward.__defaults__, cells)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _names_in(code: CodeType) -> set[str]:
    """Return the global variables that the code and the functions in it may read; a script's others may be large."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def autocast_now(device: torch.device) -> tuple[Callable[[], AbstractContextManager[Any]], torch.dtype | None]:
    """Return the autocast that is on, to be entered again, and its dtype; None where it is off."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return lambda: torch.autocast(kind, dtype=dtype, enabled=dtype is not None), dtype
