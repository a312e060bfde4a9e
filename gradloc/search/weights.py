# SPDX-License-Identifier: Apache-2.0
"""Move the sharded weights along a direction, run forwards there, and put the weights back bit for bit.

*Resharding.* An FSDP forward uses gathered copies of the weights. Unless every unit drops its copy first, a forward
after a move still sees the old weights. Worse, one after the restore may see the moved ones, in training. So all units
are resharded before every move and after the last (measured on FSDP1 and FSDP2 with both settings of
``reshard_after_forward``). Some engines' models hold other weights than the optimizer does. There the optimizer's are
moved, and the model takes them over.

*Routes.* A mixture of experts sends each token where its router's top-k says. That choice jumps where two experts are
as good, and the difference of two log-probs across a jump is no derivative; autograd, too, holds the choice fixed. So a
forward at the weights of training notes what every top-k chose, and forwards at moved weights take the same indices.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.gradients import Gradient, GradientSpace, host_copy, in_batches, totals_of
from ..core.precision import Shift, shifted_weights
from ..core.probe import Prober
from ..core.ranks import LostRank
from ..core.sharding import local_shard, unwrapped
from ..core.step import Outputs


class MovedWeights:
    """Context in which the weights may be moved. Leaving it restores them from a copy of the local shards.

    Moves are from the original weights, not from where the last one left them. All ranks call every method together.

    Args:
        space: the trainable parameters.
        compute_dtype: of the forward.
        is_wide: whether forwards are :func:`~..core.precision.float32_forwards`. Then weights kept in half precision
            are shifted there, and not rounded.
    """

    def __init__(self, space: GradientSpace, compute_dtype: torch.dtype, is_wide: bool = False):
        self._space = space
        self._dtype = torch.float32 if is_wide else compute_dtype
        self._cast = {id(weight) for weight in shifted_weights(space.module)} if is_wide else set()
        self._saved: list[torch.Tensor] = []

    @torch.no_grad()
    def __enter__(self) -> "MovedWeights":
        self._space.reshard()
        keep = host_copy if self._space.keeps_on_host else torch.clone
        params = self._space.params
        self._saved = self._space.run_local_synced(lambda: [self._kept(param, keep) for param in params])
        return self

    def _kept(self, param: torch.nn.Parameter, keep: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        shard = local_shard(param)
        return shard if id(param) in self._cast else keep(shard)

    def move(self, direction: Gradient, step: float) -> torch.Tensor:
        """Set the weights to original + step * direction.

        Returns:
            This process' part of <direction, true move>, a float64 scalar. The true move is that of the weights as a
            forward sees them, rounded to its dtype. Even in float32 it differs from ``step * direction``, which may be
            less than the last place of a large weight.
        """
        moved = self._space.run_local_synced(lambda: self._move(direction, step))
        self._space.publish()  # which may communicate
        return moved

    @torch.no_grad()
    def _move(self, direction: Gradient, step: float) -> torch.Tensor:
        space = self._space
        space.reshard()
        device = space.params[0].device
        total = torch.zeros((), dtype=torch.float64, device=device)
        shifts: dict[int, torch.Tensor] = {}
        moved: dict[bool, list[tuple[torch.Tensor, ...]]] = {True: [], False: []}
        for param, saved, part, counts in zip(space.params, self._saved, direction, space.counts, strict=True):
            if part is None:
                if id(param) not in self._cast:
                    local_shard(param).copy_(saved)
            elif id(param) in self._cast:
                shifts[id(param)] = local_shard(part)
                size = torch.linalg.vector_norm(local_shard(part).to(device).float()).double()
                total += counts * step * size**2
            else:
                moved[counts].append((local_shard(param), saved, local_shard(part)))
        for counts, parts in moved.items():
            for _, shards, *others in in_batches(*zip(*parts, strict=True)):
                was, along = ([each.to(device, non_blocking=True).float() for each in part] for part in others)
                torch._foreach_copy_(shards, torch._foreach_add(was, along, alpha=step))
                if counts:
                    off = torch._foreach_sub([each.to(self._dtype).float() for each in shards], was)
                    torch._foreach_mul_(off, along)
                    del was, along  # copies, whose memory a sum takes
                    total += totals_of(off).sum()
        space.shift = Shift(shifts, step)
        return total

    @torch.no_grad()
    def assign(self, made: Callable[[int, torch.Tensor], torch.Tensor | None]) -> bool:
        """Set this process' part of each parameter to what ``made`` gives for its number and its original part.

        :meth:`~..core.gradients.GradientSpace.publish` has to follow, on all ranks together.

        Returns:
            Whether all were given. At the first None the rest is left as it is; leaving the context restores all.
        """
        self._space.reshard()
        for index, (param, saved) in enumerate(zip(self._space.params, self._saved, strict=True)):
            shard = local_shard(param)
            value = made(index, saved.to(shard.device))
            if value is None:
                return False
            shard.copy_(value)
        return True

    @torch.no_grad()
    def distance(self) -> float:
        """Return the L2 distance of the weights from the original ones, over all weights and shards."""

        def local() -> torch.Tensor:
            square = torch.zeros(1, dtype=torch.float64, device=self._space.params[0].device)
            for param, saved, counts in zip(self._space.params, self._saved, self._space.counts, strict=True):
                if counts:
                    off = local_shard(param) - saved.to(param.device)
                    square += torch.linalg.vector_norm(off, dtype=torch.float64) ** 2
            return square

        return float(self._space.reduce(local).sqrt())

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, LostRank):
            return  # this process ends; waiting for peers or for the device might never end
        self._space.shift = None
        shards, kept = [], []
        for param, saved in zip(self._space.params, self._saved, strict=True):
            if id(param) not in self._cast:
                shards.append(local_shard(param))
                kept.append(saved)
        if shards:
            torch._foreach_copy_(shards, kept)
        self._space.publish()
        self._space.reshard()
        self._saved = []


# ---- routes

_TOP_K = (torch.topk, torch.Tensor.topk)
"""The functions by which the routers of transformers and of Megatron choose."""


def has_experts(module: torch.nn.Module) -> bool:
    """Return whether the model is a mixture of experts, by its config (transformers' or Megatron's)."""
    config: Any = getattr(unwrapped(module), "config", None)
    read = getattr(config, "get_text_config", lambda: config)
    return any(getattr(read(), name, None) for name in ("num_experts_per_tok", "num_moe_experts"))


def hold_routes(prober: Prober, micro_batches: Iterable[int]) -> None:
    """Note where the routers send each token at the present weights, which must be training's.

    One forward of each micro-batch that is not known yet; none if the model has no experts.
    """
    if not has_experts(prober.space.module):
        return
    for index in micro_batches:
        if index not in prober.routes:
            chosen: list[torch.Tensor] = []
            with _OnTopK(partial(_noted, chosen)):
                prober.forward(index)
            prober.routes[index] = chosen


def forward_on_routes(prober: Prober, micro_batch: int) -> Outputs:
    """Run :meth:`~..core.probe.Prober.forward_for_difference`, every token sent where :func:`hold_routes` noted it."""
    chosen = prober.routes.get(micro_batch)
    if not chosen:
        return prober.forward_for_difference(micro_batch)
    with _OnTopK(partial(_held, iter(chosen))):
        return prober.forward_for_difference(micro_batch)


def _noted(chosen: list[torch.Tensor], func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a top-k, and append its indices to those chosen."""
    found = func(*args, **kwargs)
    chosen.append(found.indices.to("cpu", torch.int32))
    return found


def _held(
    chosen: Iterator[torch.Tensor], func: Callable, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any
) -> Any:
    """Return the values at the next of the chosen indices in place of a top-k."""
    indices = next(chosen).to(input.device, torch.int64)
    return torch.return_types.topk((input.gather(dim, indices), indices))


class _OnTopK(TorchFunctionMode):
    """Context in which every top-k is computed by ``made``, called with the function and its arguments."""

    def __init__(self, made: Callable[..., Any]):
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return self._made(func, *args, **given) if func in _TOP_K else func(*args, **given)
