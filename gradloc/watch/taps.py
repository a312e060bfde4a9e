# SPDX-License-Identifier: Apache-2.0
"""The tap on a model: each training forward's inputs, and the gradient of its last hidden state.

A forward is kept by reference to its inputs, so it can be run again. Its last hidden state h gets a hook, through which
training's backward leaves dL/dh; a small head's output gets one for dL/dz. The gradient of some positions is then the
backward of <dL/dh, h> and of <dL/dz, z> there, whatever the loss: :meth:`ModelTap.graph` runs the forward with both cut
off behind h and z, so that nothing flows in twice.

A model that returns log-probs itself, as TRL's do, has them hooked instead: their derivatives are exact, and dL/dh is
not kept.

Where h is: a transformers model says which module is its body and which its head. h is the body's output, or the head's
input where that is another tensor (T5 scales it, BERT transforms it). In another model the head is the linear layer
that is called last, and h its input.

Shapes: B rows, T positions, H hidden size, V a head's outputs.
"""

import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ..core.forward_state import MovingState, RngState, generators_in
from ..core.gradients import host_copy
from ..core.sharding import compute_dtype, is_reduction_deferred
from ..core.step import Recorded, record
from .head import typical_size
from .step import autocast_now, auxiliary_loss, returned_log_probs
from .zero import is_engine

_SAMPLE = 64  # positions


class Place(NamedTuple):
    """Which rows of h (B, T, H) a view of it holds."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """From h's own, in elements."""

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the number in B x T of each of its rows."""
        found = torch.tensor(self.offset, device=device)
        for size, stride in zip(self.size[:-1], self.strides[:-1], strict=True):
            found = found.unsqueeze(-1) + torch.arange(size, device=device) * stride
        return found // self.size[-1]


class StageTokens(NamedTuple):
    """The tokens whose gradient a backward lets through."""

    is_low: torch.Tensor
    """bool (B, T), or (B, T - 1) where the last position predicts nothing."""
    takes_low: bool

    def factor(self, positions: tuple[int, int]) -> torch.Tensor:
        """bool (B, T): which positions are in the stage. Of logits that are one longer the last predicts nothing."""
        rows, width = positions
        missing, found = width - self.is_low.shape[1], tuple(self.is_low.shape)
        if len(self.is_low) != rows or missing not in (0, 1):
            raise ValueError(f"the stage's old_log_probs are {found}, the model's positions {positions}")
        is_low = torch.nn.functional.pad(self.is_low, (0, missing))
        return is_low if self.takes_low else ~is_low


class Forwarded:
    """One training forward: what it was given, and what its backward left."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tap: "ModelTap"):
        self.module, self.args, self.kwargs = module, args, kwargs
        self._versions = [(leaf, leaf._version) for leaf in self._inputs() if not leaf.is_inference()]
        self.rng = RngState(tap.device, tap.generators)
        self._state = tap.moving.before_forward(tap.outer)
        self.autocast, dtype = autocast_now(tap.device)
        self.dtype = dtype or compute_dtype(tap.outer)
        self.is_deferred = is_reduction_deferred(tap.outer)
        self.again: Callable[[], Any] | None = None
        """A loop's own function, where part of the loss is made in it."""
        self.shape: torch.Size | None = None
        """Of h."""
        self.is_done = False
        """Whether a backward came to its hidden state."""
        self.recorded: Recorded | None = None
        """Of the log-probs that the model returned, and of their derivatives; None where it returned none."""
        self.pull: torch.Tensor | None = None
        """dL/dh, of h's own shape, on the device or the host; None before the backward, and of an open one."""
        self.norms: torch.Tensor | None = None
        """Of dL/dh at each position, float32 (B, T)."""
        self.head_pulls: list[torch.Tensor | None] = []
        """dL/dz of each call of a head; None where it was too large to keep."""
        self.head_outputs: list[torch.Tensor | None] = []
        """z of each call of a head; None unless :attr:`ModelTap.keeps_logits` was set."""
        self.head_calls: list[tuple[torch.nn.Module, Place]] = []
        """Each head that was called on h, and on which of its rows."""
        self.is_body_alone = False
        """Whether the loop called the body by itself, and then the heads."""
        self.is_head_inlined = False
        """Whether the head's weight was used without a call of the head, as fused losses do."""
        self.auxiliary: torch.Tensor | None = None
        """dL / d (the model's own auxiliary loss), a scalar."""
        self.declared: torch.Tensor | None = None
        """dL / d (what the loop says passes through no hidden state), a scalar; it may hold the auxiliary loss."""
        self.coefficient: torch.Tensor | None = None
        """dL / d log_prob (B, T), where the loop gave its log-probs."""
        self.known: dict[str, Any] = {}
        """What the loop said of it."""
        self.stage: StageTokens | None = None
        self.factor: torch.Tensor | None = None
        """Of Lopti's, bool (B, T): the positions whose gradient training's backward lets through; None for all."""

    def _inputs(self) -> Iterator[torch.Tensor]:
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor))

    @property
    def is_open(self) -> bool:
        """Whether the loss is made of the log-probs that the model returned."""
        return self.recorded is not None and self.recorded.log_prob_coefficient is not None

    @property
    def beside(self) -> torch.Tensor | None:
        """dL / d (what passes through no hidden state), a scalar."""
        return self.auxiliary if self.again is None else self.declared

    @property
    def is_changed(self) -> bool:
        """Whether an input was written to since."""
        return any(leaf._version != version for leaf, version in self._versions)

    def run(self) -> Any:
        """Run it again, at the present weights and random state, and with the attributes that it began with."""
        self._state.restore()
        with self.autocast():
            torch.clear_autocast_cache()  # weights may have moved since it was filled
            return self.module(*self.args, **self.kwargs) if self.again is None else self.again()

    def ids(self) -> list[torch.Tensor]:
        """Return the inputs that may be token ids or labels: integers with one for each position."""
        size = self.positions
        found = [leaf for leaf in self._inputs() if leaf.dim() == 2 and tuple(leaf.shape) == size]
        integers = [leaf for leaf in found if not (leaf.is_floating_point() or leaf.dtype == torch.bool)]
        named = [self.kwargs[name] for name in ("labels", "input_ids") if name in self.kwargs]
        return sorted(integers, key=lambda leaf: not any(leaf is each for each in named))

    @property
    def size(self) -> tuple[int, ...]:
        """B, and how many tokens of a row there are log-probs of, as far as that can be known."""
        return self.positions if self.recorded is None else tuple(self.recorded.log_prob.shape)

    @property
    def positions(self) -> tuple[int, int]:
        """B and T: a vector for each row counts as one position."""
        assert self.shape is not None
        return (self.shape[0], 1) if len(self.shape) == 2 else (self.shape[0], self.shape[1])


class Graph:
    """The outputs of a forward that was run again with a graph."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.cut: torch.Tensor | None = None
        """The same, as the rest of the forward gets it."""
        self.heads: list[torch.Tensor] = []
        """The output of each call of a head, in their order."""
        self.beside: torch.Tensor | None = None
        self.given: Any = None
        """What the model returned."""
        self.anchors: list[torch.Tensor] = []
        """What the model returned: FSDP prepares its backward by hooks there."""


class _Cut(torch.autograd.Function):
    """The same value, with the graph behind it, through which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


class Zero(torch.autograd.Function):
    """A scalar zero, whose backward reaches these tensors with zeros."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.like = [(value.shape, value.dtype, value.device) for value in values]
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(torch.zeros((), dtype=d, device=v).expand(s) for s, d, v in ctx.like)


Reader = Callable[[torch.Tensor, Sequence[torch.nn.Module]], None]
"""Called inside of a forward without a graph, with h and the heads."""


class ModelTap:
    """Hooks on a model; see the module.

    Args:
        model: as the loop calls it, or what a wrapper around it holds.
        device: where it computes.
        hidden: the module whose output is the last hidden state, or its name; None: found.
        keep_bytes: how much of a step's dL/dh and dL/dz is kept on the device at most. Beyond it dL/dh waits in the
            host's memory, and dL/dz is not kept.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, hidden: torch.nn.Module | str | None, keep_bytes: int
    ):
        self.outer, self.device, self.keep_bytes = model, device, keep_bytes
        self.moves_to_host = device.type != "cpu"
        self.generators = generators_in(model)
        self.moving = MovingState()
        self.forwards: list[Forwarded] = []
        self.on_begin: Callable[[], None] = lambda: None
        """Called before a training forward is kept."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called at the end of each backward that came to a hidden state."""
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called once, where a hook failed and the tap steps aside."""
        self.has_failed = False
        self.num_seen = 0
        """Training forwards so far."""
        self.around_pass: Any = None
        """See :attr:`.step.LoopStep.around_pass`."""
        self.whole: Callable[[Sequence[torch.nn.Module]], AbstractContextManager[None]] = lambda heads: nullcontext()
        """Around a read of the heads' weights, where an engine shards them."""
        self.keeps_logits = False
        """Whether the next forward also keeps z, as far as there is room; it resets this."""
        self._is_measured = False
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.stage: StageTokens | None = None
        """Of the forwards that begin now."""
        self.unit: torch.Tensor | float = 1.0
        """About the norm of d log_prob / dh, so that dL/dh over it is like dL / d log_prob."""
        inner = innermost(model)
        self.body, head = _found_parts(inner, hidden)
        self._declared_head: Any = head
        self.is_at_head = self.body is None
        self.heads: list[torch.nn.Module] = []
        self._is_searching = self.body is None
        self._called: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []
        self._present: Forwarded | None = None
        self._is_over = False
        """Whether the present one is a body that the loop called by itself: its heads may follow."""
        self._hidden: torch.Tensor | None = None
        self._kept = 0
        self._reader: Reader | None = None
        self._graph: Graph | None = None
        self._is_cut = True
        self._is_queued = False
        self._hook_handles: list[Any] = []
        """On tensors of the present forward."""
        self._handles: list[Any] = []
        self._attached: list[torch.nn.Module] = []
        if self.body is not None:
            self._add(self.body.register_forward_pre_hook(_Hook(self, "_begin"), with_kwargs=True))
            self._add(self.body.register_forward_hook(_Hook(self, "_after_body"), with_kwargs=True))
        inside = set() if self.body is None else set(self.body.modules())
        candidates = [part for part in inner.modules() if isinstance(part, torch.nn.Linear) and part not in inside]
        if head is not None:
            candidates = [part for part in candidates if part not in set(head.modules())] + [head]
        for part in candidates:
            self._add(part.register_forward_pre_hook(_Hook(self, "_before_head")))
            self._add(part.register_forward_hook(_Hook(self, "_after_head")))
        self.attach(model)  # behind the body's, which the model may be itself
        if hidden is None and _held(inner) is not inner:
            self._listen(_held(inner))

    def attach(self, outer: torch.nn.Module) -> None:
        """Take this module's calls for training's, such as a wrapper's that is made later."""
        self.outer = outer
        if outer in self._attached:
            return
        self._listen(outer)

    def _listen(self, outer: torch.nn.Module) -> None:
        self._attached.append(outer)
        self._add(outer.register_forward_pre_hook(_Hook(self, "_begin"), with_kwargs=True))
        after = _Hook(self, "_after_model")
        self._add(outer.register_forward_hook(after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def give_up(self, error: Exception) -> None:
        """Take no further part in the run."""
        self.has_failed = True
        self.forget()
        self._present = self._hidden = None
        self.on_failure(error)

    def _add(self, handle: Any) -> None:
        self._handles.append(handle)

    def take_done(self) -> list[Forwarded]:
        """Return the forwards that had a backward, and forget all."""
        done = [each for each in self.forwards if each.is_done]
        for each in done:
            self._inline_head(each)
        self.forget()
        return done

    def _inline_head(self, forwarded: Forwarded) -> None:
        """Take the model's own head for called on all of h, where no head was called and its weight has a gradient."""
        weight = getattr(self._declared_head, "weight", None)
        if forwarded.is_open or forwarded.head_calls or weight is None or weight.dim() != 2 or not weight.requires_grad:
            return
        if forwarded.shape is None or weight.shape[1] != forwarded.shape[-1]:
            return
        forwarded.is_head_inlined = True
        forwarded.head_calls.append((self._declared_head, whole_of(forwarded.shape)))
        forwarded.head_pulls.append(None)
        forwarded.head_outputs.append(None)
        if self._declared_head not in self.heads:
            self.heads.append(self._declared_head)

    def forget(self) -> None:
        self.forwards, self._kept = [], 0

    # ---- run a forward again

    def read(self, forwarded: Forwarded, reader: Reader) -> None:
        """Run a forward without a graph; ``reader`` gets h and the heads inside of it."""
        self._reader = reader
        try:
            with torch.no_grad():
                forwarded.run()
        finally:
            self._reader = None

    def graph(self, forwarded: Forwarded, is_cut: bool = True) -> Graph:
        """Run a forward with a graph, cut behind h and behind each head's output.

        Args:
            forwarded: to be run.
            is_cut: if False, a gradient of the heads' outputs flows on into h.
        """
        self._graph, self._is_cut = Graph(), is_cut
        found = self._graph
        try:
            given = found.given = forwarded.run()
        finally:
            self._graph, self._is_cut = None, True
        if found.hidden is None and not forwarded.is_open:
            raise RuntimeError("the forward, run again, came to no hidden state")
        if forwarded.is_body_alone or forwarded.is_head_inlined:
            cut = found.cut
            assert cut is not None
            for module, place in forwarded.head_calls:
                is_whole = place.size == tuple(cut.shape)
                found.heads.append(module(cut if is_whole else cut.as_strided(*place)))
        if forwarded.again is not None and isinstance(given, tuple | list) and len(given) > 2:
            found.beside = given[2]
        return found

    @property
    def is_again(self) -> bool:
        return self._reader is not None or self._graph is not None

    # ---- hooks, in the order of a forward

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_again or not torch.is_grad_enabled() or _is_in_backward():
            return
        if self._present is not None and not self._is_over:
            self._present.dtype = autocast_now(self.device)[1] or self._present.dtype  # a wrapper may switch it on
            return
        self.num_seen += 1
        self.on_begin()
        self._present, self._hidden, self._is_over = Forwarded(module, args, kwargs, self), None, False
        self._called.clear()

    def _after_body(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = _hidden_in(output)
        if hidden is None or _is_in_backward():
            return None
        if self.is_again and not self.is_at_head:
            return _replaced(output, hidden, self._meet(hidden))
        if self._present is not None:
            if not self.is_at_head:
                self._hidden = hidden
                self._hook(hidden)
            if self._present.module is module and module not in self._attached:  # as chunked losses call it
                self._close()
                self._is_over = self._present.is_body_alone = True
        return None

    def _before_head(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor) or _is_in_backward():
            return None
        given = args[0]
        if self._present is not None and not self.is_again:
            if self._is_searching:
                return None
            if self._hidden is None and not self.is_at_head and module is self._declared_head:
                self.is_at_head, self.heads = True, [module]  # the model calls parts of its body, and not the body
            if self._hidden is not None and not self.is_at_head and not _is_view(given, self._hidden):
                if self._may_be_hidden(module, given):
                    self.is_at_head, self.heads = True, [module]
                    self._unhook()
            if self.is_at_head and module in self.heads and self._hidden is not given:
                if self._present.shape is None:
                    self._hidden = given
                    self._hook(given)
            if not self._is_measured and self._hidden is not None and _is_view(given, self._hidden):
                self._measure(module, given)  # where FSDP shards the head by itself, it is whole in its forward alone
        elif self.is_at_head and self.is_again and module in self.heads:
            if self._graph is None or self._graph.hidden is None:
                return (self._meet(given), *args[1:])
            if _is_view(given, self._graph.hidden):  # of a further head
                return (self._without_gradient(given), *args[1:])
        return None

    def _after_head(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not args or not isinstance(output, torch.Tensor) or _is_in_backward():
            return None
        if self.is_again:
            if self._graph is not None and module in self.heads and self._graph.hidden is not None:
                if self._graph.cut is not None and _is_view(args[0], self._graph.cut):
                    self._graph.heads.append(output)
                    return self._without_gradient(output)
            return None
        if self._present is not None and self._is_searching:
            self._called.append((module, args[0], output))
        elif self._present is not None and self._hidden is not None and _is_view(args[0], self._hidden):
            self._note_head(module, args[0], output)
        return None

    def _note_head(self, module: torch.nn.Module, given: torch.Tensor, output: torch.Tensor) -> None:
        """Remember a training call of a head, and hook what it returned."""
        present = self._present
        assert present is not None and self._hidden is not None
        if module not in self.heads:
            self.heads.append(module)
        present.head_calls.append((module, _place(given, self._hidden)))
        if not self._is_measured:
            self._measure(module, given)
        present.head_pulls.append(None)
        present.head_outputs.append(None)
        if present.factor is not None and output.requires_grad:
            positions = present.head_calls[-1][1].positions(output.device)
            self._let_through(output, present.factor.view(-1)[positions])
        size = output.numel() * output.element_size()
        if self.keeps_logits and self._kept + 2 * size <= self.keep_bytes:
            present.head_outputs[-1], self._kept = output.detach(), self._kept + size
        if output.requires_grad and self._kept + size <= self.keep_bytes:
            self._kept += size
            handle = output.register_hook(_Hook(self, "_keep_head", present, len(present.head_pulls) - 1))
            self._hook_handles.append(handle)

    def _after_model(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        present = self._present
        if self._graph is not None and (module is not self.body or module in self._attached):
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            auxiliary = auxiliary_loss(output)
            self._graph.beside = auxiliary if auxiliary is not None else self._graph.beside
            self._graph.anchors = leaves if isinstance(self.outer, FSDP1 | FSDPModule) else []
            return
        if present is None or self.is_again or present.module is not module:
            return
        if self._is_searching and self._called:
            self._settle_heads()
        auxiliary, returned = auxiliary_loss(output), returned_log_probs(output)
        if auxiliary is not None and auxiliary.requires_grad and present.shape is not None:
            auxiliary.register_hook(partial(add_to, present, "auxiliary"))
        if returned is not None:
            present.recorded = Recorded(present.rng)
            record(present.recorded, returned)
            returned.log_prob.register_hook(_Hook(self, "_come_back", present))
        self._close()
        self._present = self._hidden = None

    # ---- inside

    def _close(self) -> None:
        present, self.keeps_logits = self._present, False
        if present is not None and (present.shape is not None or present.recorded is not None):
            self.forwards.append(present)

    def _hook(self, hidden: torch.Tensor) -> None:
        present = self._present
        if present is not None and hidden.requires_grad and present.shape is None:
            present.shape = hidden.shape
            self._hook_handles = []
            if self.stage is not None:
                present.stage, present.factor = self.stage, self.stage.factor(present.positions).to(hidden.device)
                self._let_through(hidden, present.factor)
            self._hook_handles.append(hidden.register_hook(_Hook(self, "_keep", present)))

    def _let_through(self, value: torch.Tensor, factor: torch.Tensor) -> None:
        """Have training's backward pass these rows' gradients alone: (..., W) and bool (...)."""
        hook = partial(_where, factor.reshape(*value.shape[:-1], 1))
        self._hook_handles.append(value.register_hook(hook))

    @property
    def has_trained_head(self) -> bool:
        """Whether the model's own head has a weight that is trained."""
        weight = getattr(self._declared_head, "weight", None)
        return weight is not None and weight.requires_grad

    def _unhook(self) -> None:
        if self._present is not None and self._present.shape is not None:
            self._present.shape = None
            self._present.head_calls.clear()
            self._present.head_pulls.clear()
            self._present.head_outputs.clear()
            for handle in self._hook_handles:
                handle.remove()

    def _come_back(self, forwarded: Forwarded, *_: torch.Tensor) -> None:
        """Note that a backward has come to a forward."""
        forwarded.is_done = forwarded.is_done or not self.is_again
        if not self.is_again and not self._is_queued:
            self._is_queued = True
            queue = Variable._execution_engine.queue_callback
            after = _Hook(self, "_after_backward")
            queue(lambda: queue(after))  # behind those of DDP and FSDP, which are queued by then

    def _keep(self, forwarded: Forwarded, grad: torch.Tensor) -> None:
        if self.is_again:
            return
        self._come_back(forwarded)
        if forwarded.is_open:
            return
        add_to(forwarded, "pull", grad.to("cpu") if self._is_on_host(forwarded) else grad)
        assert forwarded.pull is not None
        norms = torch.linalg.vector_norm(grad if forwarded.norms is None else forwarded.pull, dim=-1)
        norms = norms if norms.shape == forwarded.positions else norms.view(forwarded.positions)
        forwarded.norms = norms.float().to(self.device)
        size = grad.numel() * grad.element_size()
        if self.moves_to_host and self._kept + size > self.keep_bytes:
            forwarded.pull = host_copy(forwarded.pull)
        else:
            self._kept += size

    def _is_on_host(self, forwarded: Forwarded) -> bool:
        """Whether an earlier backward's dL/dh was moved there."""
        return self.moves_to_host and forwarded.pull is not None and forwarded.pull.device.type == "cpu"

    def _after_backward(self) -> None:
        self._is_queued = False
        if self._is_over:
            self._present, self._hidden, self._is_over = None, None, False
        self.on_backward()

    def zeros_like(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros for what is not known yet; the same tensor again and again, so it must not be written to."""
        dtype = dtype or like.dtype
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.shape != like.shape or zeros.device != like.device:
            zeros = self._zeros[dtype] = torch.zeros_like(like, dtype=dtype)
        return zeros

    def _keep_head(self, forwarded: Forwarded, index: int, grad: torch.Tensor) -> None:
        if not self.is_again:
            before = forwarded.head_pulls[index]
            grad = grad.detach() if grad.requires_grad else grad  # of a double backward
            forwarded.head_pulls[index] = grad if before is None else before + grad

    def _meet(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the rest of a forward that is run again gets in h's place."""
        if self._reader is not None:
            for head in self.heads:
                if isinstance(head, FSDPModule):  # sharded by itself, it would be whole in its own forward alone
                    head.unshard()
            with (
                self.whole(self.heads),
                torch.autocast(self.device.type, enabled=False),
            ):  # the training forward's may be on
                self._reader(hidden.detach(), self.heads)
            return hidden
        assert self._graph is not None
        if self._graph.hidden is not None:
            return hidden
        self._graph.hidden, self._graph.cut = hidden, self._without_gradient(hidden)
        return self._graph.cut

    def _without_gradient(self, value: torch.Tensor) -> torch.Tensor:
        return _Cut.apply(value) if self._is_cut else value

    def _may_be_hidden(self, module: torch.nn.Module, given: torch.Tensor) -> bool:
        """Whether the model's own head is called on something else than its body's output."""
        assert self._hidden is not None
        return module is self._declared_head and given.requires_grad and given.dim() == self._hidden.dim()

    @torch.no_grad()
    def _measure(self, head: torch.nn.Module, given: torch.Tensor) -> None:
        """Measure how far a typical log-prob's derivative moves h: once, on a few positions."""
        weight = getattr(head, "weight", None)
        is_whole = isinstance(weight, torch.Tensor) and not isinstance(weight, DTensor) and weight.dim() == 2
        if is_whole and len(weight) > 1:  # type: ignore[arg-type]
            rows = given.detach().reshape(-1, given.shape[-1])[:_SAMPLE]
            self.unit, self._is_measured = typical_size(rows, weight, getattr(head, "bias", None)), True

    def _settle_heads(self) -> None:
        """Of a model that says nothing: the linear layer called last is a head, and so is each with the same input."""
        _, hidden, _ = self._called[-1]
        self._hidden, self._is_searching = hidden, False
        self._hook(hidden)
        for module, given, output in self._called:
            if _is_view(given, hidden):
                self._note_head(module, given, output)
        self._called.clear()


class _Hook:
    """Calls a tap's method, outside of what torch.compile traces. A copy of the model gets :class:`_NoHook`."""

    def __init__(self, tap: "ModelTap", name: str, *given: Any):
        self.tap, self.name, self.given = tap, name, given

    def __call__(self, *given: Any) -> Any:
        if torch.compiler.is_compiling() and _is_one_graph():
            return None
        return _called(self, *given)

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    """Takes a hook's place in a copy or a file of the model."""

    def __call__(self, *given: Any) -> None:
        return None


@torch.compiler.assume_constant_result
def _is_one_graph() -> bool:
    """Return whether ``fullgraph=True`` forbids a call into Python here. torch.compile asks while it traces."""
    translator = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator
    return bool(getattr(translator.current_tx(), "one_graph", False))


@torch.compiler.disable
def _called(hook: _Hook, *given: Any) -> Any:
    """Call it. In training nothing that goes wrong in it reaches the loop."""
    tap = hook.tap
    if tap.has_failed:
        return None
    try:
        return getattr(tap, hook.name)(*hook.given, *given)
    except Exception as error:
        if tap.is_again:
            raise
        tap.give_up(error)
        return None


def add_to(forwarded: Forwarded, name: str, grad: torch.Tensor) -> None:
    """Add what a backward left to what is known of a forward."""
    before = getattr(forwarded, name)  # of another backward through the same forward
    grad = grad.detach() if grad.requires_grad else grad
    setattr(forwarded, name, grad if before is None else before + grad)


def _where(factor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.where(factor, grad, 0.0)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def innermost(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP's, FSDP1's, DeepSpeed's and torch.compile's wrappers."""
    while True:
        if isinstance(model, FSDP1):
            model = model._fsdp_wrapped_module
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif is_engine(model):
            model = model.module
        else:
            return model


def _found_parts(
    model: torch.nn.Module, hidden: torch.nn.Module | str | None
) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Return the body, whose output is the last hidden state, and the head; None where the model does not say."""
    if isinstance(hidden, torch.nn.Module):
        return hidden, None
    if hidden is not None:
        return model.get_submodule(hidden), None
    model = _held(model)
    plain: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's around it
    asked = getattr(plain, "get_output_embeddings", None)
    if asked is None:
        return None, None
    try:
        head = asked()
    except (AttributeError, NotImplementedError):
        head = None
    head = head or next((getattr(plain, name) for name in ("score", "classifier") if hasattr(plain, name)), None)
    body = getattr(plain, "base_model", None)
    body = innermost(body) if isinstance(body, torch.nn.Module) else None
    if body is plain and head is None and hasattr(plain, "config"):  # a body that is trained without a head
        return body, None
    is_body = body is not None and body is not plain and (head is None or head not in set(body.modules()))
    return body if is_body else None, head


def _held(model: torch.nn.Module) -> torch.nn.Module:
    """Return the one transformers model that a module of the user's holds, as Lightning's do; else the module."""
    found = [part for part in model.modules() if hasattr(part, "get_output_embeddings")]
    is_one = bool(found) and set(found) <= set(found[0].modules())
    return found[0] if is_one else model


def _hidden_in(output: Any) -> torch.Tensor | None:
    found = getattr(output, "last_hidden_state", output)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, torch.Tensor) and found.is_floating_point() else None


def _replaced(output: Any, hidden: torch.Tensor, other: torch.Tensor) -> Any:
    """Return a body's output with another tensor wherever it has h: in last_hidden_state, and last in hidden_states."""
    return output if other is hidden else tree_map(lambda leaf: other if leaf is hidden else leaf, output)


def _is_view(given: torch.Tensor, hidden: torch.Tensor) -> bool:
    if given is hidden:
        return True
    is_same = given.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()
    return is_same and given.shape[-1:] == hidden.shape[-1:] and hidden.is_contiguous() and given.stride(-1) == 1


def whole_of(shape: torch.Size) -> Place:
    """Return the place of all of h."""
    strides = [1, *itertools.accumulate(reversed(shape[1:]), operator.mul)]
    return Place(tuple(shape), tuple(reversed(strides[: len(shape)])), 0)


def _place(given: torch.Tensor, hidden: torch.Tensor) -> Place:
    if given.shape == hidden.shape:
        return whole_of(given.shape)
    return Place(tuple(given.shape), given.stride(), given.storage_offset() - hidden.storage_offset())
