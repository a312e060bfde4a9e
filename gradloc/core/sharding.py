# SPDX-License-Identifier: Apache-2.0
"""How FSDP1, FSDP2, DDP and a plain module lay out parameters and gradients: the only code that knows."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, _runtime_utils
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model in what torch wraps around it, FSDP1 or DDP; FSDP2 wraps nothing."""
    if isinstance(module, FSDP1):
        return module._fsdp_wrapped_module
    return module.module if isinstance(module, DistributedDataParallel) else module


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lives on this rank, itself: ``to_local`` makes a view of it, which is an operation."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def compute_device(param: torch.Tensor) -> torch.device:
    """Where forwards run and ranks reduce: with FSDP2's ``offload_policy`` another device than the shards'."""
    kind = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    if kind == param.device.type:
        return param.device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def named_shards(name: str, param: torch.Tensor, values: torch.Tensor | None = None) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of a parameter, by the names that the model gives: of FSDP1's flat parameter all that it holds.

    Args:
        name: of the parameter, as the sharded module has it.
        param: the parameter.
        values: of its shape, such as its gradient; None for the weights themselves.

    Returns:
        Names and flat or sharded tensors, the same names on every rank; empty tensors where another rank has all.
    """
    shard = local_shard(param.detach() if values is None else values)
    infos = getattr(param, "_shard_param_infos", None)
    if infos is None:
        return [(name.replace("_fsdp_wrapped_module.", ""), shard)]
    unit = name.replace("_fsdp_wrapped_module.", "").removesuffix("_flat_param")
    starts = [(info.offset_in_shard or 0, info.numel_in_shard or 0) for info in infos]
    parts = [shard[start : start + count] for start, count in starts]
    return [(unit + of_unit, part) for of_unit, part in zip(param._fqns, parts, strict=True)]  # type: ignore[attr-defined]


def shard_groups(module: torch.nn.Module, params: list[torch.nn.Parameter]) -> list[dist.ProcessGroup]:
    """Process groups over which squared local norms add up; replicas (hybrid sharding) are not counted twice."""
    if not dist.is_initialized():
        return []
    if isinstance(module, FSDP1):
        return [] if module.process_group is None else [module.process_group]
    sharded = [param for param in params if isinstance(param, DTensor)]
    if not sharded:
        return []
    layouts = {(param.device_mesh, tuple(isinstance(p, Shard) for p in param.placements)) for param in sharded}
    if len(layouts) > 1 or len(sharded) < len(params):
        raise ValueError("gradloc needs all trainable parameters sharded in the same way, found a mixture of layouts")
    mesh, is_sharded = layouts.pop()
    return [mesh.get_group(dim) for dim, shard in enumerate(is_sharded) if shard]


def abandon_pass(module: torch.nn.Module) -> None:
    """Make the module fit for the next forward after an exception has cut off a forward or backward.

    FSDP notes on the module where in a pass it is. torch's own end of a backward puts all of that back; it is called
    here with no gradient left that it would reduce over the ranks, so without a collective. Every collective that has
    been issued must be one that all ranks have issued (see :meth:`.ranks.Ranks.together`). ``.grad`` is emptied.
    """
    device = compute_device(next(module.parameters()))
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    if isinstance(module, FSDP1):
        _abandon_fsdp1(module)
    elif isinstance(module, FSDPModule):
        _abandon_fsdp2(module)
    elif isinstance(module, DistributedDataParallel):
        module.reducer._reset_state()  # which waits for the hooks of a backward that did not come
    for param in module.parameters():
        param.grad = None


def _abandon_fsdp1(root: FSDP1) -> None:
    handles = [unit._handle for unit in FSDP1.fsdp_modules(root) if unit._handle is not None]
    for handle in handles:
        handle.flat_param.grad = None
        handle.flat_param._post_backward_called = False  # type: ignore[attr-defined]
        vars(handle.flat_param).pop("_saved_grad_shard", None)
    _runtime_utils._post_backward_final_callback(root, root)
    for handle in handles:
        if handle.uses_sharded_strategy:
            handle.reshard(True)  # the root keeps its gathered weights from forward to backward


def _abandon_fsdp2(root: FSDPModule) -> None:
    state = root._get_fsdp_state()
    shared, traffic = state._state_ctx, state._comm_ctx
    for param in _fsdp2_params(shared.all_states):
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    state._root_post_backward_final_callback()
    shared.iter_forward_root = None
    traffic.all_gather_state = None


def _fsdp2_params(units: Iterable[Any]) -> Iterator[Any]:
    for unit in units:
        groups = getattr(unit, "_fsdp_param_groups", None)  # a single one up to torch 2.10
        for group in [unit._fsdp_param_group] if groups is None else groups:
            yield from [] if group is None else group.fsdp_params


def reshard(module: torch.nn.Module) -> None:
    """Have the next forward gather all weights anew."""
    if isinstance(module, FSDP1):
        for wrapped in FSDP1.fsdp_modules(module):
            handle = wrapped._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(True)
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def gradient_dtypes(module: torch.nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What FSDP adds micro-batches' gradients up in while it does not reduce them, and what it reduces them in."""
    if isinstance(module, FSDP1):
        handles = [unit._handle for unit in FSDP1.fsdp_modules(module) if unit._handle is not None]
        pairs = [(handle._fwd_bwd_param_dtype, handle._reduce_dtype) for handle in handles]
    else:
        policies = [unit._get_fsdp_state()._mp_policy for unit in module.modules() if isinstance(unit, FSDPModule)]
        reduced = [policy.reduce_dtype or policy.param_dtype or torch.float32 for policy in policies]
        pairs = [(dtype, dtype) for dtype in reduced]  # FSDP2 adds up in what it reduces in
    coarsest = [max(dtypes, key=lambda dtype: torch.finfo(dtype).eps) for dtypes in zip(*pairs, strict=True)]
    return (coarsest[0], coarsest[1]) if coarsest else (None, None)


def trainable(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Name and parameter as the optimizer has it.

    After a forward without a backward (verl's log-probs, with ``reshard_after_forward`` off) FSDP2's module still shows
    gathered weights, which are freed in the next backward.
    """
    units = [unit._get_fsdp_state() for unit in module.modules() if isinstance(unit, FSDPModule)]
    gathered = [param for param in _fsdp2_params(units) if hasattr(param, "_unsharded_param")]
    shards = {id(param._unsharded_param): param.sharded_param for param in gathered}
    return [(name, shards.get(id(param), param)) for name, param in module.named_parameters() if param.requires_grad]
