# SPDX-License-Identifier: Apache-2.0
"""Forwards without a graph in float32, whatever training computes in.

A search reads differences of two forwards. In half precision such a difference is mostly rounding; in float32 it is
right to some digits. Nothing of training's own precision changes for good: on leaving, every unit of FSDP gathers what
it gathered before, into the same tensors, and weights that are kept in half precision were never written to.

- Autocast is off.
- FSDP2 and FSDP1 gather the weights in float32, whatever their ``param_dtype``, FSDP2 from a float32 copy of shards
  that are kept in half precision.
- Weights that are kept whole in half precision (plain, DDP) are cast a layer at a time. A step along a direction is
  added to the cast or the copy, so a move is not rounded to the weights' own precision.
- transformers' flash kernels, which take no float32, are replaced by torch's own attention, packed rows one by one.
- On a card, matrix products take TF32, at half of bfloat16's speed.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.utils._pytree import tree_map

from ..private_api import replaced
from .sharding import compute_device, fsdp1_handles, fsdp2_params, fsdp2_units, local_shard, reshard, unwrapped

HALVES = (torch.bfloat16, torch.float16)
UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, *HALVES)}
"""Unit roundoff by dtype."""
TF32_UNIT = UNITS[torch.float16]  # as many bits of mantissa


class NoFloat32(Exception):
    """This model cannot compute in float32; the search goes on in training's precision."""


class Shift(NamedTuple):
    """A step of the weights that are cast: ``step`` times a direction, added to each cast."""

    directions: Mapping[int, torch.Tensor]
    """By ``id`` of each parameter, of its shape, on any device."""
    step: float


def forward_unit(module: torch.nn.Module) -> float:
    """Return the unit roundoff of matrix products within :func:`float32_forwards`."""
    device = compute_device(next(module.parameters()))
    return UNITS[torch.float32] if device.type == "cpu" else TF32_UNIT


def cast_weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights that are kept whole in half precision, which :func:`float32_forwards` casts."""
    sharded = {id(param.sharded_param) for param in fsdp2_params(fsdp2_units(module))}
    sharded |= {id(handle.flat_param) for handle in fsdp1_handles(module)}
    return [param for param in module.parameters() if param.dtype in HALVES and id(param) not in sharded]


def cast_bytes(module: torch.nn.Module) -> int:
    """Return the bytes that :func:`float32_forwards` takes for casts: of the largest layer, of the weights in no layer,
    and of FSDP2's shards."""
    casts = _Casts(cast_weights(module), None)

    def size(places: list[_Place]) -> int:
        weights: dict[int, Any] = {id(owner._parameters[name]): owner._parameters[name] for owner, name in places}
        return torch.float32.itemsize * sum(weight.numel() for weight in weights.values())

    layers, others = casts.places(unwrapped(module))
    shards = [param for param in fsdp2_params(fsdp2_units(module)) if param.sharded_param.dtype in HALVES]
    copies = torch.float32.itemsize * sum(param._sharded_param_data.numel() for param in shards)
    return copies + size(others) + max(map(size, layers.values()), default=0)


def shifted_weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights kept in half precision that :func:`float32_forwards` shifts: those that it casts, and FSDP2's
    shards, which it gathers from a float32 copy."""
    sharded = (param.sharded_param for param in fsdp2_params(fsdp2_units(module)))
    return [*cast_weights(module), *(param for param in sharded if param.dtype in HALVES)]


@contextmanager
def float32_forwards(module: torch.nn.Module, shift: Shift | None = None) -> Iterator[None]:
    """Let forwards without a graph gather, cast and compute in float32. All ranks enter and leave together.

    Args:
        module: the model that training calls: plain, DDP, FSDP1 or FSDP2.
        shift: of the weights that are kept in half precision (:func:`shifted_weights`).

    Raises:
        NoFloat32: quantized weights, or FSDP1's flat ones in half precision. A model may refuse with any other error
            in its forward, such as a kernel that takes no float32.
    """
    refuse_quantized(module)
    with ExitStack() as stack:
        for part in (
            _no_autocast(),
            _gathered_wide(module, shift),
            _cast_by_layer(module, shift),
            _without_flash(),
            _tensor_cores(module),
        ):
            stack.enter_context(part)
        yield


def refuse_quantized(module: torch.nn.Module) -> None:
    """Raise :class:`NoFloat32` where casting weights does not make the computation float32."""
    params = [*module.parameters(), *(param.sharded_param for param in fsdp2_params(fsdp2_units(module)))]
    if any(not param.is_floating_point() or param.dtype.itemsize < 2 for param in params):
        raise NoFloat32("weights are quantized")
    if any(hasattr(local_shard(param), "fsdp_pre_all_gather") for param in params):
        raise NoFloat32("weights are gathered in a format of their own")
    if any(handle.flat_param.dtype in HALVES for handle in fsdp1_handles(module)):
        raise NoFloat32("FSDP1 keeps the weights in half precision")


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Switch autocast off in this thread, also where the trainer's own forward switches it on."""
    enter, thread = torch.autocast.__enter__, threading.get_ident()

    def entered(self: Any) -> Any:
        found = enter(self)
        if threading.get_ident() == thread:
            torch.set_autocast_enabled(self.device, False)
        return found

    kinds = [kind for kind in {"cpu", _accelerator()} if torch.amp.is_autocast_available(kind)]
    was = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        with replaced(torch.autocast, __enter__=entered):
            yield
    finally:
        torch.clear_autocast_cache()  # weights may have moved since it was filled
        for kind in kinds:
            torch.set_autocast_enabled(kind, was[kind])


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


@contextmanager
def _tensor_cores(module: torch.nn.Module) -> Iterator[None]:
    """Allow TF32 in matrix products of float32 on a card."""
    if compute_device(next(module.parameters())).type == "cpu":
        yield
        return
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


@contextmanager
def _without_flash() -> Iterator[None]:
    """Let transformers call :func:`_attention` where it would call a flash kernel; it pads, packs and scatters."""
    holder: Any = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(holder, "_flash_varlen_fn", None) is None:
        yield
        return
    with replaced(holder, _flash_fn=_attention, _flash_varlen_fn=_packed_attention):
        yield


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Compute attention of (B, T, heads, D), called as a flash kernel is; keys and values may have fewer heads."""
    others.pop("deterministic", None)
    asked = [name for name, given in others.items() if given not in (None, 0, False, (-1, -1))]
    if asked or query.shape[1] != key.shape[1]:
        raise NoFloat32(f"attention with {', '.join(asked) or 'other keys than queries'} has no float32 here")
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    given: dict[str, Any] = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": query.shape[1] != key.shape[1]}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2)


def _packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    **given: Any,
) -> torch.Tensor:
    """Compute attention of packed rows, (all T, heads, D); ``cu_seqlens`` are where they begin and end."""
    ends = cu_seqlens_q.tolist()
    if cu_seqlens_k.tolist() != ends:
        raise NoFloat32("attention of rows to others has no float32 here")
    return torch.cat(
        [_attention(query[None, a:b], key[None, a:b], value[None, a:b], **given) for a, b in pairwise(ends)], 1
    )[0]


# ---- FSDP


@contextmanager
def _gathered_wide(module: torch.nn.Module, shift: Shift | None) -> Iterator[None]:
    """Gather sharded weights in float32; on leaving, all gathered copies are dropped."""
    handles, units = fsdp1_handles(module), fsdp2_units(module)
    if not handles and not units:
        yield
        return
    reshard(module)
    with _widened_fsdp1(module), _widened_fsdp2(units, shift):
        try:
            yield
        finally:
            reshard(module)  # while each unit still knows the format of what it gathered


@contextmanager
def _widened_fsdp1(module: torch.nn.Module) -> Iterator[None]:
    """Gather by FSDP1's ``use_full_precision_in_eval``, with the wrapped modules alone in eval: modules inside, such as
    dropout, keep their mode."""
    wrapped = [unit for unit in module.modules() if isinstance(unit, FSDP1)]
    owners = {id(unit): unit for unit in wrapped}
    owners |= {id(handle._fully_sharded_module): handle._fully_sharded_module for handle in fsdp1_handles(module)}
    handles = fsdp1_handles(module)
    modes = [(owner, owner.training) for owner in owners.values()]
    flags = [(part, part._use_full_prec_in_eval) for part in [*handles, *wrapped]]
    try:
        for owner, _ in modes:
            owner.training = False  # of this module alone, where .eval() goes down
        for part, _ in flags:
            part._use_full_prec_in_eval = True
        yield
    finally:
        for owner, mode in modes:
            owner.training = mode
        for part, flag in flags:
            part._use_full_prec_in_eval = flag


_GATHERED = (
    "all_gather_outputs",
    "_unsharded_inner_tensors",
    "_unsharded_param",
    "param_dtype",
    "reduce_dtype",
    "_sharded_param_data",
)
"""Attributes of FSDP2's parameter: its gathered copy, and what that is gathered from."""


@contextmanager
def _widened_fsdp2(units: list[Any], shift: Shift | None) -> Iterator[None]:
    """Give each parameter another gathered copy, in float32, and put training's own objects back afterwards."""
    params = list(fsdp2_params(units))
    kept = [{name: vars(param)[name] for name in _GATHERED if name in vars(param)} for param in params]
    policies = [(unit, unit._mp_policy) for unit in units]
    try:
        for param in params:
            vars(param).pop("_unsharded_param", None)
            param.all_gather_outputs, param._unsharded_inner_tensors = [], []
            param.param_dtype = None if param.sharded_param.dtype == torch.float32 else torch.float32
            param.reduce_dtype = None
            if param.sharded_param.dtype in HALVES:
                param._sharded_param_data = wide = param._sharded_param_data.float()
                _add_shift(wide, param.sharded_param, shift)
        for unit, policy in policies:
            unit._mp_policy = MixedPrecisionPolicy(torch.float32, cast_forward_inputs=policy.cast_forward_inputs)
        yield
    finally:
        for param, was in zip(params, kept, strict=True):
            vars(param).pop("_unsharded_param", None)
            vars(param).update(was)
        for unit, policy in policies:
            unit._mp_policy = policy


# ---- weights that are kept in half precision


@contextmanager
def _cast_by_layer(module: torch.nn.Module, shift: Shift | None) -> Iterator[None]:
    """Give each layer float32 copies of its weights while its forward runs, and other modules all the time.

    A layer is an entry of the model's outermost module lists. The others, such as embedding and head, hold weights that
    trainers also read without that module's forward.
    """
    model, casts = unwrapped(module), _Casts(cast_weights(module), shift)
    with ExitStack() as stack:
        stack.callback(lambda: casts.narrow([*casts.kept]))
        if casts.is_needed or any(isinstance(unit, FSDP1 | FSDPModule) for unit in module.modules()):
            stack.callback(model.register_forward_pre_hook(_wide_inputs, with_kwargs=True).remove)
        layers, others = casts.places(model)
        casts.widen(others)
        for layer, parts in layers.items():
            widened = layer.register_forward_pre_hook(lambda *_, parts=parts: casts.widen(parts))
            stack.callback(widened.remove)
            narrowed = layer.register_forward_hook(lambda *_, parts=parts: casts.narrow(parts), always_call=True)
            stack.callback(narrowed.remove)
        yield


def _wide_inputs(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast a forward's inputs from half precision to float32."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value

    return tree_map(wide, args), tree_map(wide, kwargs)


_Place = tuple[torch.nn.Module, str]
"""A module and the name of a parameter of its own."""


class _Casts:
    """The weights that are cast, and where a cast is in place now."""

    def __init__(self, weights: list[torch.nn.Parameter], shift: Shift | None):
        self._weights, self._shift = {id(weight) for weight in weights}, shift
        self.kept: dict[_Place, torch.nn.Parameter] = {}

    @property
    def is_needed(self) -> bool:
        return bool(self._weights)

    def places(self, model: torch.nn.Module) -> tuple[dict[torch.nn.Module, list[_Place]], list[_Place]]:
        """Return the places of each layer's weights, and those of the weights that are in no layer."""
        if not self.is_needed:
            return {}, []
        lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
        inner = {id(below) for part in lists for below in part.modules() if below is not part}
        outer = [layer for part in lists if id(part) not in inner for layer in part]
        taken = {id(below) for layer in outer for below in layer.modules()}
        others = [part for part in model.modules() if id(part) not in taken]
        return {layer: self._of([*layer.modules()]) for layer in outer}, self._of(others)

    def _of(self, owners: list[torch.nn.Module]) -> list[_Place]:
        return [(owner, name) for owner in owners for name in owner._parameters if self._is_cast(owner, name)]

    def _is_cast(self, owner: torch.nn.Module, name: str) -> bool:
        return id(owner._parameters[name]) in self._weights

    def widen(self, places: list[_Place]) -> None:
        """Put float32 copies, with the shift, in these places."""
        made: dict[int, torch.nn.Parameter] = {}
        for owner, name in places:
            weight: Any = owner._parameters[name]
            if (owner, name) in self.kept:
                continue
            if id(weight) not in made:
                made[id(weight)] = torch.nn.Parameter(self._cast(weight), requires_grad=False)
            self.kept[owner, name], owner._parameters[name] = weight, made[id(weight)]

    def _cast(self, weight: torch.nn.Parameter) -> torch.Tensor:
        wide = weight.detach().float()
        _add_shift(wide, weight, self._shift)
        return wide

    def narrow(self, places: list[_Place]) -> None:
        """Put the weights themselves back."""
        for owner, name in places:
            if (owner, name) in self.kept:
                owner._parameters[name] = self.kept.pop((owner, name))


def _add_shift(wide: torch.Tensor, weight: torch.nn.Parameter, shift: Shift | None) -> None:
    """Add the weight's shift to its float32 copy: of its shape, or 1D and padded at its end."""
    along = None if shift is None else shift.directions.get(id(weight))
    if shift is not None and along is not None:
        part = along.to(wide.device, torch.float32)
        there = wide if wide.shape == part.shape else wide[: part.numel()].view(part.shape)
        there.add_(part, alpha=shift.step)
