# SPDX-License-Identifier: Apache-2.0
"""Hooks on a model that keep each training forward's inputs and the gradient of its last hidden state.

A forward is kept by reference to its inputs, so it can be run again. Its last hidden state h gets a hook, through which
training's backward leaves dL/dh; a small head's output gets one for dL/dz. The gradient of some positions is then the
backward of <dL/dh, h> and of <dL/dz, z> there, whatever the loss: :meth:`ModelTap.graph` runs the forward with both cut
off behind h and z, so that nothing flows in twice.

A model that returns log-probs itself, as TRL's do, has them hooked instead: their derivatives are exact, and dL/dh is
not kept.

Where h is: a transformers model says which module is its body and which its head. h is the body's output, or the head's
input where that is another tensor (T5 scales it, BERT transforms it). In another model the head is the linear layer
that is called last, and h its input, if all of the output's gradient passes there. Else h is the model's output, or all
of its outputs that the loss uses (:mod:`.outputs`).

Shapes: B rows, T positions, H hidden size, V a head's outputs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from ..core.forward_state import MovingState, generators_in
from ..core.gradients import GradientSpace, host_copy
from ..core.sharding import is_compiled
from ..core.step import Recorded
from .forwarded import (
    Graph,
    HeadCall,
    Place,
    RecordedForward,
    StageTokens,
    autocast_now,
    auxiliary_loss,
    detached,
    returned_log_probs,
)
from .head import typical_size
from .hooks import Hook, make_hookable
from .models import find_body_and_head, innermost, is_sequence_first, trained_parts
from .outputs import hook_parts, joinable, tensors_in, with_aliases
from .paths import hidden_in, is_view, replace_hidden, side_outputs
from .scalars import Scalars, scalar_attributes
from .unknown import Choice, UnknownModel

_NUM_SAMPLED = 64  # positions
_MOST_OUTPUTS = 16  # tensors of a model's output that are asked where they come from


class _Cut(torch.autograd.Function):
    """Identity whose backward passes no gradient on, though the graph stays connected."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


Reader = Callable[[torch.Tensor, Sequence[torch.nn.Module]], None]
"""Called inside of a forward without a graph, with h and the heads."""


class ModelTap:
    """Keeps the training forwards of a model, and runs them again.

    Args:
        model: as the loop calls it, or what a wrapper around it holds.
        device: where it computes.
        hidden: the module whose output is the last hidden state, or its name; None: find it.
        keep_bytes: most bytes of a step's dL/dh and dL/dz that stay on the device. Beyond it dL/dh moves to the host,
            and dL/dz is not kept.
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, hidden: torch.nn.Module | str | None, keep_bytes: int
    ):
        self.outer, self.device, self.keep_bytes = model, device, keep_bytes
        self.moves_to_host = device.type != "cpu"
        self.generators = generators_in(model)
        self.moving = MovingState()
        self.forwards: list[RecordedForward] = []
        self.on_begin: Callable[[], None] = lambda: None
        """Called before a training forward is kept."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called at the end of each backward that came to a hidden state."""
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Called once, after a hook failed and the tap has given up."""
        self.on_other_state: Callable[[], None] = lambda: None
        """Called where another tensor is h from now on, so that earlier forwards cannot be run again."""
        self.has_failed = False
        self.num_seen = 0
        """Training forwards so far."""
        self.around_pass: Callable[[bool], AbstractContextManager[None]] | None = None
        """An engine's own, around a micro-batch of a pass; called with whether it is the last."""
        self.whole: Callable[[Sequence[torch.nn.Module]], AbstractContextManager[None]] = lambda heads: nullcontext()
        """Around a read of the heads' weights, where an engine shards them."""
        self.keeps_logits = False
        """Whether the next forward also keeps z, as far as there is room; it resets this."""
        self._is_measured = False
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.stage: StageTokens | None = None
        """The stage of the forwards that begin from now on."""
        self.unit: torch.Tensor | float = 1.0
        """Typical norm of d log_prob / dh: the norm of dL/dh over it is about |dL / d log_prob|."""
        inner = innermost(model)
        self.body, head = find_body_and_head(inner, hidden)
        self._is_sequence_first = is_sequence_first(inner)
        self._tied_head = None
        """Has the embedding's weight, where a head is called with it and has none of its own."""
        if self._is_sequence_first and getattr(head, "weight", None) is None:
            self._tied_head = _head_with(inner.shared_embedding_or_output_weight())  # type: ignore[operator]
        self._declared_head: Any = self._tied_head or head
        self.is_at_head = self.body is None
        self.heads: list[torch.nn.Module] = []
        self._unknown = UnknownModel(model) if self.body is None else None
        """What h is chosen from; None once it is."""
        self._is_by_row = False
        self._side_outputs: list[int] | None = None
        """Which tensors of the model's output do not come from h alone; None before the first forward."""
        self._scalars = Scalars()
        self._used: dict[int, torch.Tensor] = {}
        """The output's tensors that the loss uses, without values, where some of these passes by h and is no scalar."""
        self._uses_sides = False
        """Whether the loss used one of these since h was chosen."""
        self._joined: list[int] = []
        """The outputs that are h together; empty where h is one tensor."""
        self._uncalled: list[torch.nn.Linear] = []
        """Linear layers that an unknown model's first forward did not call, where its output is h."""
        self._present: RecordedForward | None = None
        self._hidden: torch.Tensor | None = None
        self._waiting: list[tuple[RecordedForward, torch.Tensor]] = []
        """Forwards that ended at h, each with its h: the loop may call heads on it before the backward."""
        self._kept = 0
        self._reader: Reader | None = None
        self._graph: Graph | None = None
        self._is_cut = True
        self._is_queued = False
        self._hook_handles: list[Any] = []
        """Hooks on tensors of the present forward."""
        self._handles: list[Any] = []
        self._attached: list[torch.nn.Module] = []
        if self.body is not None:
            self._handles.append(self.body.register_forward_pre_hook(Hook(self, "_begin"), with_kwargs=True))
            self._handles.append(self.body.register_forward_hook(Hook(self, "_after_body"), with_kwargs=True))
        inside = set() if self.body is None else set(self.body.modules())
        candidates: list[torch.nn.Module] = [
            part for part in inner.modules() if isinstance(part, torch.nn.Linear) and part not in inside
        ]
        if head is not None:
            candidates = [part for part in candidates if part not in set(head.modules())] + [head]
        for part in candidates:
            self._handles.append(part.register_forward_pre_hook(Hook(self, "_before_head")))
            self._handles.append(part.register_forward_hook(Hook(self, "_after_head")))
        self.attach(model)  # after the body's hooks, since the model may be its own body
        if hidden is None and type(inner).forward in (torch.nn.Module.forward, None):
            self.listen_to_methods()
        for part in trained_parts(inner) if hidden is None and len(self._attached) == 1 else ():
            self._listen(part)  # which a method of the user's own may call, such as a training_step

    def head_names(self, space: GradientSpace) -> frozenset[str]:
        """Return the names of the heads' parameters among the trained ones."""
        heads = {id(param) for head in self.heads for param in head.parameters()}
        return frozenset(name for name, param in zip(space.names, space.params, strict=True) if id(param) in heads)

    def attach(self, outer: torch.nn.Module) -> None:
        """Keep this module's calls as training's, such as those of a wrapper that is made later."""
        self.outer = outer
        if outer in self._attached:
            return
        self._listen(outer)

    def _listen(self, outer: torch.nn.Module) -> None:
        self._attached.append(outer)
        self._handles.append(outer.register_forward_pre_hook(Hook(self, "_begin"), with_kwargs=True))
        after = Hook(self, "_after_model")
        self._handles.append(outer.register_forward_hook(after, with_kwargs=True, always_call=True))

    def listen_to_methods(self) -> None:
        """Also keep the calls of the model's own methods where it has no forward, or none was seen."""
        for method in [] if is_compiled(self.outer) else make_hookable(innermost(self.outer)):
            self._handles.append(method)
            self._listen(method)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def give_up(self, error: Exception) -> None:
        """Keep nothing from now on, and report the error once."""
        self.has_failed = True
        self.forget()
        self._present = self._hidden = None
        self.on_failure(error)

    def take_done(self) -> list[RecordedForward]:
        """Return the forwards that had a backward, and forget all forwards."""
        done = [each for each in self.forwards if each.is_done]
        for each in done:
            self._add_inlined_head(each)
        self.forget()
        return done

    def _add_inlined_head(self, forwarded: RecordedForward) -> None:
        """Add a call of the model's own head on all of h, where none was called and its weight has a gradient. In an
        unknown model that is the one linear layer without a call."""
        if forwarded.has_log_probs or forwarded.head_calls or forwarded.shape is None:
            return
        used = [head for head in self._uncalled if head.weight.grad is not None]
        if self._declared_head is None and len(used) == 1:
            self._declared_head = used[0]
        weight = getattr(self._declared_head, "weight", None)
        if weight is None or weight.dim() != 2 or not weight.requires_grad or weight.shape[1] != forwarded.shape[-1]:
            return
        forwarded.is_head_inlined = True
        forwarded.head_calls.append(HeadCall(self._declared_head, Place.whole(forwarded.shape)))
        if self._declared_head not in self.heads:
            self.heads.append(self._declared_head)

    def forget(self) -> None:
        self.forwards, self._kept = [], 0
        self._waiting.clear()

    # ---- run a forward again

    def read(self, forwarded: RecordedForward, reader: Reader) -> None:
        """Run a forward without a graph, and call ``reader`` inside of it."""
        self._reader = reader
        try:
            with torch.no_grad():
                forwarded.run()
        finally:
            self._reader = None

    def graph(self, forwarded: RecordedForward, is_cut: bool = True, left_out: torch.Tensor | None = None) -> Graph:
        """Run a forward with a graph, cut behind h and behind each head's output.

        Unless ``is_cut``, nothing is cut: a gradient of the heads' outputs flows into h.
        """
        self._graph, self._is_cut = Graph(is_cut_behind_heads=not forwarded.has_log_probs), is_cut
        found = self._graph
        try:
            given = found.given = forwarded.run(left_out)
        finally:
            self._graph, self._is_cut = None, True
        if found.hidden is None and not forwarded.has_log_probs:
            raise RuntimeError("the forward, run again, came to no hidden state")
        if forwarded.is_body_alone or forwarded.is_head_inlined:
            cut = found.cut
            assert cut is not None
            for call in forwarded.head_calls:
                is_whole = call.place.size == tuple(cut.shape)
                found.heads.append(call.head(cut if is_whole else cut.as_strided(*call.place)))
        if forwarded.again is not None and isinstance(given, tuple | list) and len(given) > 2:
            found.auxiliary = given[2]
        return found

    @property
    def is_again(self) -> bool:
        return self._reader is not None or self._graph is not None

    # ---- hooks, in the order of a forward

    def _begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_again or not torch.is_grad_enabled() or _is_in_backward():
            return
        if self._present is not None:
            self._present.dtype = autocast_now(self.device)[1] or self._present.dtype  # a wrapper may switch it on
            return
        if self._uses_sides and not self.forwards and not isinstance(self.outer, FSDP1 | FSDPModule):
            self._join(module)
        self.num_seen += 1
        self.on_begin()
        self._present, self._hidden = RecordedForward(module, args, kwargs, self), None
        if self._unknown is not None:
            self._unknown.linear_calls.clear()

    def _after_body(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden = hidden_in(output)
        if _is_in_backward() or module is not self.body:
            return None
        if self._joined:
            return self._after_joined(output)
        if hidden is None:
            return None
        if self.is_again and not self.is_at_head:
            return replace_hidden(output, hidden, self._turned(self._pass_hidden(self._turned(hidden))))
        if self._present is not None:
            if not self.is_at_head:
                self._hidden = self._turned(hidden)
                self._hook(self._hidden)
                output = replace_hidden(output, hidden, self._turned(self._hidden))
            if self._present.module is module and module not in self._attached:  # as chunked losses call it
                self._close()
                self._wait_for_heads()
            return output if self._is_sequence_first else None
        return None

    def _unshared(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) that what comes behind cannot write to; Megatron's loss writes to those in float32."""
        return logits.clone() if self._is_sequence_first and logits.dtype == torch.float32 else logits

    def _turned(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a state (T, B, H) as (B, T, H), or back, in a model whose sequences come first; else the state."""
        return hidden.transpose(0, 1) if self._is_sequence_first else hidden

    def _before_head(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(args[0], torch.Tensor) or _is_in_backward():
            return None
        given = args[0]
        if not self.is_again:
            if self._present is not None and self._unknown is None:
                self._hook_at_head(self._present, module, given)
        elif self.is_at_head and module in self.heads:
            if self._graph is None or self._graph.hidden is None:
                return (self._pass_hidden(given), *args[1:])
            if is_view(given, self._graph.hidden):  # of a further head
                return (self._without_gradient(given), *args[1:])
        return None

    def _hook_at_head(self, present: RecordedForward, module: torch.nn.Module, given: torch.Tensor) -> None:
        """Hook a head's input as h in a training forward, where the body's output is not h; measure the head once."""
        if module is self._declared_head and not self.is_at_head:
            hidden = self._hidden  # None where the model calls parts of its body, and not the body
            if hidden is None or (not is_view(given, hidden) and given.requires_grad and given.dim() == hidden.dim()):
                self.is_at_head, self.heads = True, [module]
                if present.shape is not None:  # of the body's output
                    present.shape = None
                    present.head_calls.clear()
                    for handle in self._hook_handles:
                        handle.remove()
        if self.is_at_head and module in self.heads and self._hidden is not given and present.shape is None:
            self._hidden = given
            self._hook(given)
        if not self._is_measured and self._hidden is not None and is_view(given, self._hidden):
            # where FSDP shards the head by itself, it is whole in its forward alone
            self._measure(self._tied_head or module, given)

    def _after_head(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._is_sequence_first and isinstance(output, tuple):  # and a bias
            changed = self._after_head(self._tied_head or module, args, output[0])
            return None if changed is None else (changed, *output[1:])
        if not args or not isinstance(output, torch.Tensor) or _is_in_backward():
            return None
        if self.is_again:
            if self._graph is not None and module in self.heads and self._graph.hidden is not None:
                if self._graph.cut is not None and is_view(args[0], self._graph.cut):
                    self._graph.heads.append(output)
                    return _Cut.apply(self._unshared(output)) if self._graph.is_cut_behind_heads else output
            return None
        if self._present is not None and self._unknown is not None:
            self._unknown.linear_calls.append((module, args[0], output))
            return None
        present = [] if self._present is None or self._hidden is None else [(self._present, self._hidden)]
        for forwarded, hidden in present or self._waiting[::-1]:
            if is_view(args[0], hidden):
                self._note_head(forwarded, hidden, module, args[0], output)
                break
        return None

    def _note_head(
        self,
        present: RecordedForward,
        hidden: torch.Tensor,
        module: torch.nn.Module,
        given: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Keep a training call of a head, and hook its output."""
        if module not in self.heads:
            self.heads.append(module)
        call = HeadCall(module, Place.find(given, hidden))
        present.head_calls.append(call)
        if not self._is_measured:
            self._measure(module, given)
        if present.factor is not None and output.requires_grad:
            self._mask_grad(output, present.factor.view(-1)[call.place.positions(output.device)])
        size = output.numel() * output.element_size()
        if self.keeps_logits and self._kept + 2 * size <= self.keep_bytes:
            call.output, self._kept = self._unshared(output.detach()), self._kept + size
        if output.requires_grad and self._kept + size <= self.keep_bytes:
            self._kept += size
            self._hook_handles.append(output.register_hook(Hook(self, "_keep_head_grad", call)))

    def _after_model(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        present = self._present
        if self._graph is not None and (module is not self.body or module in self._attached):
            leaves, auxiliary = tensors_in(output), auxiliary_loss(output)
            auxiliary = self._scalars.stacked(leaves) if auxiliary is None else auxiliary
            self._graph.auxiliary = auxiliary if auxiliary is not None else self._graph.auxiliary
            is_sharded = isinstance(self.outer, FSDP1 | FSDPModule)
            self._graph.anchors = [leaf for leaf in leaves if leaf.requires_grad] if is_sharded else []
            return None
        if present is None or self.is_again or present.module is not module:
            return None
        if self._unknown is not None:
            self._choose_hidden(self._unknown, module, output)
        auxiliary, returned = auxiliary_loss(output), returned_log_probs(output)
        if auxiliary is not None and auxiliary.requires_grad and present.shape is not None:
            auxiliary.register_hook(partial(present.add, "model_auxiliary"))
        if returned is not None:
            present.recorded = Recorded(present.rng)
            present.recorded.hook(returned)
            returned.log_prob.register_hook(Hook(self, "_note_backward", present))
        is_shared = returned is None and (present.shape is not None or bool(self._side_outputs))
        replaced = self._hook_side_outputs(present, output) if is_shared else None
        self._close()
        if self.body is module and returned is None:
            self._wait_for_heads()
        self._present = self._hidden = None
        return replaced

    # ---- inside

    def _hook_side_outputs(self, present: RecordedForward, output: Any) -> Any:
        """Return the output with hooked aliases, None where all of it comes from h: the gradient of a scalar that does
        not is kept, and which other tensors get one is noted."""
        leaves = tensors_in(output)
        if self._side_outputs is None and self._hidden is not None:
            heads = [*self.heads, *self._uncalled, *([] if self._declared_head is None else [self._declared_head])]
            self._side_outputs = side_outputs(leaves[:_MOST_OUTPUTS], self._hidden, heads)
            is_seen = auxiliary_loss(output) is not None
            self._scalars.places = [place for place in self._side_outputs if not (leaves[place].dim() or is_seen)]
            kept = [] if is_seen else scalar_attributes(self.outer)
            values = [value for each in kept if (value := each.value) is not None]
            self._scalars.attributes = [kept[place] for place in side_outputs(values, self._hidden, heads)]
        self._scalars.hook_attributes(present)
        sides = [place for place in self._side_outputs or () if place < len(leaves) and place not in self._joined]
        trained = [place for place, leaf in enumerate(leaves[:_MOST_OUTPUTS]) if leaf.requires_grad]
        places = [place for place in trained if leaves[place].dim() and place not in self._joined]
        places = places if any(leaves[place].dim() for place in sides) else []
        places += [place for place in trained if place in self._scalars.places]
        if not places:
            return None
        output, views = with_aliases(output, places)
        for place, view in zip(places, views, strict=True):
            if place in self._scalars.places:
                self._scalars.hook(present, self._scalars.places.index(place), view)
            else:
                view.register_hook(partial(self._note_used, present, place, place in sides))
        return output

    def _note_used(self, present: RecordedForward, place: int, is_side: bool, grad: torch.Tensor) -> None:
        self._used[place] = grad.to("meta")
        if is_side:
            present.is_passed_by = self._uses_sides = True

    def _join(self, module: torch.nn.Module) -> None:
        """Take the model's outputs that the loss uses for h from the next forward on, since it uses several."""
        self._uses_sides, used = False, sorted(self._used)
        if not joinable([self._used[place] for place in used]):
            return
        self.heads, self._declared_head, self.is_at_head = [], None, False
        self._joined, self._is_by_row, self._unknown = used, False, None
        self.on_other_state()
        if self.body is not module:
            self.body = module
            self._handles.append(
                module.register_forward_hook(Hook(self, "_after_body"), with_kwargs=True, prepend=True)
            )

    def _after_joined(self, output: Any) -> Any:
        """Hook the outputs that are h together, or run a replayed forward's backward from them."""
        leaves, present = tensors_in(output), self._present
        parts = [leaves[place] for place in self._joined if place < len(leaves)]
        if self.is_again:
            self._pass_hidden(torch.cat(joinable(parts), -1))
        elif present is not None and present.shape is None and self.stage is None:
            places = [place for place in self._joined if place < len(leaves) and leaves[place].requires_grad]
            if len(places) == len(self._joined) and joinable(parts):
                output, views = with_aliases(output, places)
                present.shape = hook_parts(views, Hook(self, "_keep_hidden_grad", present))
                return output
        return None

    def _wait_for_heads(self) -> None:
        """Let the loop call heads on the present forward's h, as losses in chunks do."""
        if self._present is not None and self._hidden is not None:
            self._present.is_body_alone = True
            self._waiting.append((self._present, self._hidden))
        self._present = self._hidden = None

    def _close(self) -> None:
        present, self.keeps_logits = self._present, False
        if present is not None and (present.shape is not None or present.recorded is not None):
            self.forwards.append(present)

    def _hook(self, hidden: torch.Tensor) -> None:
        present = self._present
        if present is not None and hidden.requires_grad and present.shape is None:
            present.shape, present.is_by_row = hidden.shape, self._is_by_row
            self._hook_handles = []
            if self.stage is not None:
                present.stage, present.factor = self.stage, self.stage.factor(present.positions).to(hidden.device)
                self._mask_grad(hidden, present.factor)
            self._hook_handles.append(hidden.register_hook(Hook(self, "_keep_hidden_grad", present)))

    def _mask_grad(self, value: torch.Tensor, factor: torch.Tensor) -> None:
        """Zero training's gradient of this tensor (..., W) where the factor, bool (...), is false."""
        hook = partial(_zero_outside, factor.reshape(*value.shape[:-1], 1))
        self._hook_handles.append(value.register_hook(hook))

    @property
    def has_trained_head(self) -> bool:
        """Whether the model's own head has a weight that is trained."""
        weight = getattr(self._declared_head, "weight", None)
        return weight is not None and weight.requires_grad

    def _note_backward(self, forwarded: RecordedForward, *_: torch.Tensor) -> None:
        """Note that a backward has reached a forward."""
        forwarded.is_done = forwarded.is_done or not self.is_again
        if not self.is_again and not self._is_queued:
            self._is_queued = True
            queue = Variable._execution_engine.queue_callback
            after = Hook(self, "_after_backward")
            queue(lambda: queue(after))  # behind those of DDP and FSDP, which are queued by then

    def _keep_hidden_grad(self, forwarded: RecordedForward, grad: torch.Tensor) -> None:
        if self.is_again:
            return
        self._note_backward(forwarded)
        if forwarded.has_log_probs:
            return
        before = forwarded.hidden_grad
        is_on_host = self.moves_to_host and before is not None and before.device.type == "cpu"
        forwarded.add("hidden_grad", grad.to("cpu") if is_on_host else grad)
        grads = grad if forwarded.norms is None else forwarded.hidden_grad
        norms = torch.linalg.vector_norm(grads.flatten(1) if forwarded.is_by_row else grads, dim=-1)
        norms = norms if norms.shape == forwarded.positions else norms.view(forwarded.positions)
        forwarded.norms = norms.float().to(self.device)
        size = grad.numel() * grad.element_size()
        if self.moves_to_host and self._kept + size > self.keep_bytes:
            forwarded.hidden_grad = host_copy(forwarded.hidden_grad)
        else:
            self._kept += size

    def _after_backward(self) -> None:
        self._is_queued = False
        self._waiting.clear()
        self.on_backward()

    def zeros_like(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros that are shared between calls, so they must not be written to."""
        dtype = dtype or like.dtype
        zeros = self._zeros.get(dtype)
        if zeros is None or zeros.shape != like.shape or zeros.device != like.device:
            zeros = self._zeros[dtype] = torch.zeros_like(like, dtype=dtype)
        return zeros

    def _keep_head_grad(self, call: HeadCall, grad: torch.Tensor) -> None:
        if not self.is_again:
            call.logit_grad = detached(grad) if call.logit_grad is None else call.logit_grad + detached(grad)

    def _pass_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the rest of a replayed forward gets in h's place, after reading or cutting h."""
        if self._reader is not None:
            for head in self.heads:
                if isinstance(head, FSDPModule):  # sharded by itself, it would be whole in its own forward alone
                    head.unshard()
            # the training forward's autocast may be on
            with self.whole(self.heads), torch.autocast(self.device.type, enabled=False):
                self._reader(hidden.detach(), self.heads)
            return hidden
        assert self._graph is not None
        if self._graph.hidden is not None:
            return hidden
        self._graph.hidden, self._graph.cut = hidden, self._without_gradient(hidden)
        return self._graph.cut

    def _without_gradient(self, value: torch.Tensor) -> torch.Tensor:
        return _Cut.apply(value) if self._is_cut else value

    @torch.no_grad()
    def _measure(self, head: torch.nn.Module, given: torch.Tensor) -> None:
        """Measure :attr:`unit` once, on a few positions."""
        weight = getattr(head, "weight", None)
        if not isinstance(weight, torch.Tensor) or isinstance(weight, DTensor):
            return
        if weight.dim() == 2 and len(weight) > 1:
            rows = given.detach().reshape(-1, given.shape[-1])[:_NUM_SAMPLED]
            self.unit, self._is_measured = typical_size(rows, weight, getattr(head, "bias", None)), True

    def _choose_hidden(self, unknown: UnknownModel, module: torch.nn.Module, output: Any) -> None:
        """Choose h after a forward of an unknown model; the next one shows more where this one does not."""
        choice = unknown.choose(module, output)
        if choice is None and unknown.part_calls is not None and not unknown.handles:
            parts = (part for part in module.modules() if part is not module)
            unknown.handles = [part.register_forward_hook(Hook(self, "_after_part")) for part in parts]
        elif choice is not None and choice.hidden is None:
            sizes = [leaf.dim() for leaf in tensors_in(output)[:_MOST_OUTPUTS]]
            self._side_outputs = [*range(len(sizes))]
            self._scalars.places = [place for place, size in enumerate(sizes) if not size]
        elif choice is not None:
            self._take(choice, unknown)
            for handle in unknown.handles:
                handle.remove()
        unknown.linear_calls.clear()

    def _take(self, choice: Choice, unknown: UnknownModel) -> None:
        """Take the chosen tensor for h, now and in later forwards."""
        assert choice.hidden is not None
        self._hidden, self._is_by_row, self._unknown = choice.hidden, choice.is_by_row, None
        self._hook(choice.hidden)
        if choice.module is not None:
            self.body, self.is_at_head = choice.module, False
            after = Hook(self, "_after_body")
            is_outer = choice.module in self._attached  # whose own hook comes behind
            self._handles.append(choice.module.register_forward_hook(after, with_kwargs=True, prepend=is_outer))
        if choice.weight is not None:
            self._declared_head = _head_with(choice.weight)
        elif choice.module is not None:
            self._uncalled = unknown.uncalled
        else:
            for head, given, logits in unknown.linear_calls:
                if self._present is not None and is_view(given, choice.hidden):
                    self._note_head(self._present, choice.hidden, head, given, logits)

    def _after_part(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden = hidden_in(output)
        if self._present is None or self._unknown is None or hidden is None or not hidden.requires_grad:
            return
        if self._unknown.part_calls is not None:
            self._unknown.part_calls.append((module, hidden))


def _head_with(weight: torch.nn.Parameter) -> torch.nn.Linear:
    """Return a head with this weight (V, H), which a model uses without a head of its own."""
    head = torch.nn.Linear(1, 1, bias=False, device="meta")
    head.weight = weight
    return head


def _zero_outside(factor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.where(factor, grad, 0.0)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
