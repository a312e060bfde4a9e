# SPDX-License-Identifier: Apache-2.0
"""The gradient in ``.grad`` as one vector, however FSDP or DDP lays it out over the processes.

Setting a gradient aside and putting it back moves references and copies nothing, so what training left comes back bit
for bit. A norm or an inner product is summed over the local shards first, then over the group that shards them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from .forward_state import ForwardState, OwnBuffers
from .memory_plans import HOST_PART, PART
from .precision import Shift
from .ranks import Ranks
from .sharding import (
    abandon_pass,
    compute_device,
    gradient_dtypes,
    local_shard,
    named_shards,
    reshard,
    shard_groups,
    trainable,
    unwrapped,
)

T = TypeVar("T")
Gradient = list[torch.Tensor | None]

_ROW = 2**12  # elements whose squares are summed in float32
_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes that torch takes norms of


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into the host's memory, pinned if it comes from a device; the copy may finish after the return."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return copy.copy_(tensor, non_blocking=True)


def in_parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape at the same places into parts: views, to write through.

    A part has at most ``PART`` elements, or ``HOST_PART`` on a CPU. Smaller tensors come as they are, and so do tensors
    that are not contiguous.
    """
    most = _part_size(tensors[0])
    if tensors[0].numel() <= most or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    yield from zip(*(tensor.view(-1).split(most) for tensor in tensors), strict=True)


def in_batches(*lists: Sequence[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Group tensors for torch's foreach functions, which launch one kernel for many: at most a part's elements at a
    time, larger tensors :func:`in_parts`, all in order.

    Yields:
        The place of each tensor or part in its list, and a list of tensors for each of the given ones.

    Args:
        lists: as many tensors each; those at the same place have one shape.
    """
    batch: list[tuple[Any, ...]] = []
    size = 0
    for place, tensors in enumerate(zip(*lists, strict=True)):
        for parts in in_parts(*tensors):
            count = parts[0].numel()
            if batch and size + count > _part_size(parts[0]):
                yield tuple(map(list, zip(*batch, strict=True)))
                batch, size = [], 0
            batch.append((place, *parts))
            size += count
    if batch:
        yield tuple(map(list, zip(*batch, strict=True)))


def totals_of(
    tensors: Sequence[torch.Tensor], factors: Sequence[torch.Tensor] | None = None, are_absolute: bool = False
) -> torch.Tensor:
    """Return the sum of each tensor's elements, without a copy of a whole tensor: float64 (num_tensors,).

    Args:
        tensors: of any dtypes.
        factors: multiply the elements by these, in float32 at least; on the tensors' device.
        are_absolute: sum absolute values.
    """
    found: list[torch.Tensor] = []
    places: list[int] = []
    for where, batch, *more in in_batches(tensors, *(() if factors is None else (factors,))):
        if more:
            batch = torch._foreach_mul(*([_at_least_float32(each) for each in part] for part in (batch, *more)))
        batch = [each if each.dtype in _SUMMED else each.double() for each in batch]
        if not are_absolute:  # no foreach function sums: take positive elements twice, and the sizes of all once less
            batch += torch._foreach_clamp_min(batch, 0.0)
        norms = torch.stack(torch._foreach_norm(batch, 1, torch.float64))
        found.append(norms if are_absolute else 2 * norms[len(where) :] - norms[: len(where)])
        places += where
    if len(places) == len(tensors):
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
    parts = torch.cat(found).split([len(list(group)) for _, group in itertools.groupby(places)])
    return torch.stack([each.sum() for each in parts])


def _part_size(tensor: torch.Tensor) -> int:
    return HOST_PART if is_slow(tensor.device) else PART


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def is_slow(device: torch.device) -> bool:
    """Return whether reading a whole gradient takes a noticeable part of an update there."""
    return device.type == "cpu"


def squared_norms(tensors: Sequence[torch.Tensor | None], are_weights: bool = False) -> torch.Tensor:
    """Return the squared L2 norm of each tensor: float64 (num_tensors,), 0 for None.

    In float64, since the square of a float32 norm overflows from 1e19 on, and spikes do reach that.

    Args:
        tensors: all on one device, at least one of them not None.
        are_weights: whether each has to be right to the last digit. On a CPU gradients are not: off by 1e-7, at half
            the price.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    if is_slow(there[0].device):
        found = iter([_squared_norm(tensor, are_weights) for tensor in there])
    else:
        found = iter(torch.stack(torch._foreach_norm(there, 2.0, torch.float64)).square_())
    zero = torch.zeros((), dtype=torch.float64, device=there[0].device)
    return torch.stack([zero if tensor is None else next(found) for tensor in tensors])


def _squared_norm(tensor: torch.Tensor, is_weight: bool) -> torch.Tensor:
    """Return a tensor's squared norm on a CPU.

    Rows of a gradient are summed in float32, their squares in float64, unless that over- or underflows. All else is
    summed in float64, in parts, since torch copies what it takes such a norm of.
    """
    flat = tensor.flatten()
    if flat.dtype == torch.float32 and not is_weight:
        whole = flat.numel() // _ROW * _ROW
        square = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double().square().sum()
        if 0 < square < math.inf:
            return square + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64) ** 2
    return sum(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 for part in flat.split(HOST_PART))


class GradientSpace:
    """The trainable parameters of a (sharded) module, seen as one vector space.

    Args:
        module: the actor as the trainer calls it: FSDP1, FSDP2, DDP or plain.
        ranks: they all learn when one of them fails in its own part of a sum, such as by running out of memory; None if
            an error may end the run.

    An engine that keeps its parameters elsewhere (Megatron) subclasses this: it calls :meth:`_hold` and overrides what
    differs.

    Raises:
        ValueError: when parameters are sharded in different ways.
    """

    _buffers: Sequence[OwnBuffers] = ()
    """Before the step's first forward."""
    model: Any = None
    """The model whose plain attributes a forward may move; None where an engine keeps it in parts."""
    heads: frozenset[str] = frozenset()
    """Names of the output heads' parameters, where the trainer says so."""
    is_mirrored = False
    """Whether the model holds copies of the weights that are moved here, in a precision of their own."""
    shift: Shift | None = None
    """The move of weights that are cast for a forward (:func:`.precision.cast_weights`)."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks | None = None):
        self.module = module
        self.model = module if isinstance(module, FSDP1) else unwrapped(module)
        """The model without torch's wrapper: parameters by the model's own names, but for FSDP1's inner wrappers."""
        self._buffers = [OwnBuffers(owner) for owner in self.model.modules() if owner._buffers]
        named = trainable(self.model)
        groups = shard_groups(module, [param for _, param in named])
        self._hold(named, groups, gradient_dtypes(module), ranks)
        self.are_summed = not (isinstance(module, FSDP1) and groups and groups[0].size() == 1 < self.num_replicas)

    def _hold(
        self, named: list[tuple[str, Any]], groups: list[Any], dtypes: Sequence[Any], ranks: Ranks | None
    ) -> None:
        """Take (name, parameter) pairs, the same names on every process; empty if another process holds all of it."""
        self._ranks = ranks
        self.names: list[str] = [name for name, _ in named]
        self.has_names = not any(name.endswith("_flat_param") for name in self.names)  # not FSDP1's flat ones
        self.params: list[torch.nn.Parameter] = [param for _, param in named]
        self.counts = [True] * len(named)
        """Whether this process' part of each parameter counts in sums: False if another process has the same part."""
        self.rounding = max((torch.finfo(param.dtype).eps / 2 for param in self.params), default=0.0)
        """Unit roundoff of one addition of gradients, 2**-24 in float32 (half of ``eps``)."""
        self.room: Any = None
        """The :class:`.memory.SearchMemory` that makes sure of memory before each pass; None outside of a search."""
        self.keeps_on_host = False  # whether gradients set aside and weights saved go to the host's memory
        self._summed_in, self._reduced_in = dtypes
        self._groups = groups
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        self.num_replicas: int = num_processes // math.prod(group.size() for group in self._groups)
        """The number of processes that hold the same shard: more than 1 with DDP and hybrid sharding."""
        self.are_summed = True
        """Whether replicas' gradients are summed. FSDP1 forgets to when each process holds the whole model."""
        self.shard_index = sum(group.rank() for group in self._groups)
        """Different for different shards, the same for replicas of one."""

    def forward_state(self) -> ForwardState:
        """Save everything that forwards change, with the buffers that they have changed since this space was made."""
        moved = [each for each in self._buffers if each.have_moved()]
        return ForwardState(self.device, moved, self.model, self.module)

    @property
    def device(self) -> torch.device:
        """The device on which forwards run and ranks reduce; with FSDP2's ``offload_policy`` shards are on the host."""
        return compute_device(self.params[0])

    @property
    def is_offloaded(self) -> bool:
        """Whether the shards and their gradients are in the host's memory while forwards run on the device."""
        return self.params[0].device.type != self.device.type

    def reduction_error(self, num_micro_batches: int, reduces_once: bool) -> float:
        """Return the relative error of training's own sums over ranks; 0 where they are in float32.

        Every rank that adds its gradient rounds once. If ranks reduce only after the last micro-batch, every
        micro-batch added before rounds once as well. n independent roundings of a unit add up to sqrt(n) units.
        """
        dtypes = {self._reduced_in} | ({self._summed_in} if reduces_once else set())
        unit = max((torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype is not None), default=0.0)
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        num_roundings = num_processes + (num_micro_batches if reduces_once else 1)
        return unit * num_roundings**0.5 if unit > torch.finfo(torch.float32).eps else 0.0

    def reshard(self) -> None:
        """Drop all gathered copies of weights, so that the next forward sees the shards as they are now.

        Before weights move: else it sees the old ones. After they are back: else it sees the moved ones.
        """
        reshard(self.module)
        if self.is_offloaded:  # no copy of a shard may be under way when it changes
            torch.get_device_module(self.device.type).synchronize(self.device)

    def publish(self) -> None:
        """Copy moved weights into the model, in engines whose model is not made of the optimizer's own weights."""

    def abandon_pass(self) -> None:
        """Make the module fit for training after a pass that was cut off, see :func:`.sharding.abandon_pass`."""
        abandon_pass(self.module)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return this process' part of every parameter, trained or frozen, by name (:func:`named_shards`)."""
        return [part for name, param in self.model.named_parameters() for part in named_shards(name, param)]

    def counted(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Empty the tensors that do not count on this process (:attr:`counts`)."""
        counted = zip(tensors, self.counts, strict=True)
        return [part if is_own or part is None else part.detach().flatten()[:0] for part, is_own in counted]

    def take(self) -> Gradient:
        """Remove the gradient from ``.grad`` and return it."""
        gradient = [param.grad for param in self.params]
        self.clear()
        return gradient

    def keep(self) -> Gradient:
        """Remove the gradient from ``.grad`` and return it, in the host's memory if ``keeps_on_host``."""
        return self.run_local_synced(self._move_to_host) if self.keeps_on_host else self.take()

    def _move_to_host(self) -> Gradient:
        kept: Gradient = []
        for param in self.params:
            kept.append(None if param.grad is None else host_copy(local_shard(param.grad)))
            param.grad = None
        device = self.params[0].device
        if device.type != "cpu":  # the copies are asynchronous
            torch.get_device_module(device.type).current_stream(device).synchronize()
        return kept

    @torch.no_grad()
    def put(self, gradient: Gradient) -> None:
        """Make this the content of ``.grad``: the same tensors, or copies of those on the host. Bit-exact."""
        for param, grad in zip(self.params, gradient, strict=True):
            if grad is not None and (
                grad.device != param.device or isinstance(grad, DTensor) != isinstance(param, DTensor)
            ):
                kept, grad = grad, torch.zeros_like(param, dtype=grad.dtype)
                local_shard(grad).copy_(kept)
            param.grad = grad

    def clear(self) -> None:
        """Empty ``.grad``."""
        for param in self.params:
            param.grad = None

    def squares(self, gradient: Gradient | None = None) -> torch.Tensor:
        """Return the squared L2 norm of each parameter's gradient over all shards: float64 (num_params,) on the host.

        The same on every rank; 0 where there is no gradient.

        Args:
            gradient: a gradient set aside; None for what is in ``.grad``.
        """
        return self.reduce(lambda: self.own_squares(gradient))

    def own_squares(self, gradient: Gradient | None = None) -> torch.Tensor:
        """Return this process' part of :meth:`squares`, on the shards' device: for :meth:`reduce_all`."""
        grads = self.counted(self.current() if gradient is None else gradient)
        return self._squared([None if grad is None else local_shard(grad) for grad in grads])

    def squares_by_name(self, gradient: Gradient | None = None) -> dict[str, float]:
        """Return :meth:`squares` by the model's own names, also where FSDP1 has flat parameters."""
        names, shards = zip(*self.named_shards(gradient), strict=True)
        return dict(zip(names, self.reduce(lambda: self._squared(shards)).tolist(), strict=True))

    def named_shards(self, gradient: Gradient | None = None) -> list[tuple[str, torch.Tensor | None]]:
        """Return this process' part of a gradient by the model's own names; ``gradient`` as in :meth:`squares`."""
        grads = self.counted(self.current() if gradient is None else gradient)
        return [
            (part, None if grad is None else shard)
            for name, param, grad in zip(self.names, self.params, grads, strict=True)
            for part, shard in named_shards(name, param, grad)
        ]

    def norm(self, gradient: Gradient | None = None) -> float:
        """Return the L2 norm over all parameters and shards; NaN or inf when an element is not finite."""
        return sum(self.squares(gradient).tolist()) ** 0.5

    def dots(self, left: Gradient, right: Gradient) -> torch.Tensor:
        """Return the inner product per parameter over all shards: float64 (num_params,) on the host; 0 without one."""

        return self.reduce(lambda: self.own_dots(left, right))

    def own_dots(self, left: Gradient, right: Gradient) -> torch.Tensor:
        """Return this process' part of :meth:`dots`, on the shards' device."""
        nothing = self._zeros(0)
        pairs = [
            (nothing, nothing) if a is None or b is None else (local_shard(a), local_shard(b).to(a.device))
            for a, b in zip(self.counted(left), self.counted(right), strict=True)
        ]
        return totals_of([a for a, _ in pairs], [b for _, b in pairs]).to(nothing.device)

    def _squared(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor:
        zeros = self._zeros(len(shards))
        return squared_norms(shards).to(zeros.device) if any(shard is not None for shard in shards) else zeros

    def current(self) -> Gradient:
        """Return the tensors in ``.grad``, left in place."""
        return [param.grad for param in self.params]

    def scale(self, factor: float) -> None:
        """Multiply what is in ``.grad`` in place."""
        self.scale_each([factor] * len(self.params))

    @torch.no_grad()
    def scale_each(self, factors: Sequence[float]) -> None:
        """Multiply each parameter's ``.grad`` in place by its own factor, (num_params,); 1 leaves it untouched."""
        pairs = zip(self.current(), factors, strict=True)
        scaled = [(local_shard(grad), factor) for grad, factor in pairs if grad is not None and factor != 1.0]
        if scaled:
            torch._foreach_mul_([grad for grad, _ in scaled], [factor for _, factor in scaled])

    @torch.no_grad()
    def add(self, gradient: Gradient, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient set aside to what is in ``.grad``, in place."""
        pairs = []
        for param, other in zip(self.params, gradient, strict=True):
            if other is not None:
                if param.grad is None:
                    param.grad = torch.zeros_like(param, dtype=other.dtype)
                pairs.append((local_shard(param.grad), local_shard(other)))
        for _, grads, others in in_batches(*zip(*pairs, strict=True)):
            here = [part.to(grad.device, non_blocking=True) for grad, part in zip(grads, others, strict=True)]
            torch._foreach_add_(grads, here, alpha=alpha)

    @torch.no_grad()
    def local_squares(self) -> torch.Tensor:
        """Return each parameter's squared norm of this rank's part of ``.grad``, (num_params,): no communication."""
        shards = [local_shard(param) if param.grad is None else local_shard(param.grad) for param in self.params]
        shards = [shard for shard in self.counted(shards) if shard is not None]
        squares = torch.stack(torch._foreach_norm(shards)).square_()
        missing = [index for index, param in enumerate(self.params) if param.grad is None]
        if missing:
            squares[missing] = 0.0
        return squares

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.params[0].device)

    def run_local_synced(self, local: Callable[[], T]) -> T:
        """Run a local computation by :meth:`.ranks.Ranks.run_local_synced`, or plainly where there are no ranks."""
        return local() if self._ranks is None else self._ranks.run_local_synced(local)

    def reduce(self, local: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Sum over all shards what each process computes by itself; moving the sum to the host is the only wait."""
        return self.reduce_all(lambda: [local()])[0]

    def reduce_all(
        self, local: Callable[[], Sequence[torch.Tensor]], along: Sequence[torch.Tensor] = ()
    ) -> list[torch.Tensor]:
        """Sum several tensors as :meth:`reduce` does one, by one reduction and one wait: float64, in their shapes.

        Args:
            local: computes this process' parts.
            along: scalars of this process alone, to be read with the sums.

        Returns:
            The sums, and last a tensor of ``along``.
        """
        shapes: list[torch.Size] = []

        def joined() -> torch.Tensor:
            parts = local()
            shapes.extend(part.shape for part in parts)
            return torch.cat([part.double().flatten() for part in parts])

        # the shards' group may not be able to reduce host tensors
        values = self.run_local_synced(joined).to(self.device)
        for group in self._groups:
            dist.all_reduce(values, group=group)
        scalars = [torch.stack([each.to(values.device) for each in along]).double()] if along else []
        *sums, rest = torch.cat([values, *scalars]).cpu().split([*(shape.numel() for shape in shapes), len(along)])
        return [*(part.view(shape) for part, shape in zip(sums, shapes, strict=True)), rest]
