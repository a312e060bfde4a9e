# SPDX-License-Identifier: Apache-2.0
"""The layouts of parameters and gradients under FSDP1, FSDP2, DDP and in a plain module. No other core module knows.

Much of this is torch's private state, since no public call drops gathered weights or clears a pass that failed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, _runtime_utils
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside FSDP1's or DDP's wrapper; FSDP2 wraps nothing."""
    if isinstance(module, FSDP1):
        return module._fsdp_wrapped_module
    return module.module if isinstance(module, DistributedDataParallel) else module


_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the wrappers of FSDP1, checkpointing and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` is around the model or a part of it."""
    parts = model.modules()
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the tensor itself, where ``to_local`` would run an operation to make
    a view.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def compute_device(param: torch.Tensor) -> torch.device:
    """Return the device where forwards run and ranks reduce: not the shards' with FSDP2's ``offload_policy``."""
    kind = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
    if kind == param.device.type:
        return param.device
    return torch.device(kind, torch.get_device_module(kind).current_device())


def named_shards(name: str, param: torch.Tensor, values: torch.Tensor | None = None) -> list[tuple[str, torch.Tensor]]:
    """Return this rank's part of a parameter under the model's own names: several of them for FSDP1's flat parameter.

    Args:
        name: of the parameter, as the sharded module has it.
        values: of its shape, such as its gradient; None for the weights themselves.

    Returns:
        (name, part) pairs, the same names on every rank; a part is empty if other ranks hold all of it.
    """
    shard = local_shard(param.detach() if values is None else values)
    infos = getattr(param, "_shard_param_infos", None)
    if infos is None:
        return [(name.replace("_fsdp_wrapped_module.", ""), shard)]
    unit = name.replace("_fsdp_wrapped_module.", "").removesuffix("_flat_param")
    starts = [(info.offset_in_shard or 0, info.numel_in_shard or 0) for info in infos]
    parts = [shard[start : start + count] for start, count in starts]
    return [(unit + fqn, part) for fqn, part in zip(param._fqns, parts, strict=True)]  # type: ignore[attr-defined]


def shard_groups(module: torch.nn.Module, params: list[torch.nn.Parameter]) -> list[dist.ProcessGroup]:
    """Return the process groups over which sums over local shards add up to the whole; replicas count once.

    Raises:
        ValueError: when parameters are sharded in different ways.
    """
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
    """Make the module fit for the next forward after an exception cut off a forward or backward; empties ``.grad``.

    FSDP keeps on the module where in a pass it is. torch's own end-of-backward callback resets that. It is called here
    after all gradients that it would reduce have been dropped, so it runs no collective. Every collective issued so far
    must be one that all ranks issued (:meth:`.ranks.Ranks.run_collective`).
    """
    device = compute_device(next(module.parameters()))
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    if isinstance(module, FSDP1):
        _abandon_fsdp1(module)
    elif isinstance(module, FSDPModule):
        _abandon_fsdp2(module)
    elif isinstance(module, DistributedDataParallel):
        module.reducer._reset_state()  # it still waits for the hooks of a backward that will not come
    for param in module.parameters():
        param.grad = None


def fsdp1_handles(root: torch.nn.Module) -> list[Any]:
    """Return the handles of all of FSDP1's flat parameters; none where FSDP1 is not in use."""
    return [unit._handle for unit in root.modules() if isinstance(unit, FSDP1) and unit._handle is not None]


def _abandon_fsdp1(root: FSDP1) -> None:
    for handle in fsdp1_handles(root):
        handle.flat_param.grad = None
        handle.flat_param._post_backward_called = False
        vars(handle.flat_param).pop("_saved_grad_shard", None)
    _runtime_utils._post_backward_final_callback(root, root)
    reshard(root)  # the root keeps its gathered weights from forward to backward


def _abandon_fsdp2(root: FSDPModule) -> None:
    state = root._get_fsdp_state()
    shared, traffic = state._state_ctx, state._comm_ctx
    for param in fsdp2_params(shared.all_states):
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    state._root_post_backward_final_callback()
    shared.iter_forward_root = None
    traffic.all_gather_state = None


def fsdp2_units(module: torch.nn.Module) -> list[Any]:
    """Return the state of each of FSDP2's units."""
    return [unit._get_fsdp_state() for unit in module.modules() if isinstance(unit, FSDPModule)]


def _fsdp2_groups(units: Iterable[Any]) -> Iterator[Any]:
    for unit in units:
        groups = getattr(unit, "_fsdp_param_groups", None)  # a single one up to torch 2.10
        yield from (group for group in ([unit._fsdp_param_group] if groups is None else groups) if group is not None)


def fsdp2_params(units: Iterable[Any]) -> Iterator[Any]:
    """Yield what FSDP2 knows of each parameter of these units."""
    for group in _fsdp2_groups(units):
        yield from group.fsdp_params


def reshard(module: torch.nn.Module) -> None:
    """Drop every unit's gathered weights, so that the next forward gathers the shards as they are now.

    Every unit, not the root alone: measured on FSDP1 and FSDP2, a forward otherwise reads some weights as they were
    before a move, and training's next forward some moved ones (docs/method.md, section 3).
    """
    if isinstance(module, FSDP1):
        for handle in fsdp1_handles(module):
            if handle.uses_sharded_strategy:
                handle.reshard(True)
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def is_reduction_deferred(module: torch.nn.Module) -> bool:
    """Return whether a backward now would leave the sum over ranks to a later one: under ``no_sync``, or FSDP2's
    setting.
    """
    if isinstance(module, DistributedDataParallel):
        return not module.require_backward_grad_sync
    if isinstance(module, FSDP1):
        return not module._sync_gradients
    return any(not group.reduce_grads for group in _fsdp2_groups(fsdp2_units(module)))


@contextmanager
def reduction_deferred(module: torch.nn.Module) -> Iterator[None]:
    """Have backwards in here leave the sum over ranks to the next one outside."""
    if isinstance(module, DistributedDataParallel | FSDP1):
        with module.no_sync():
            yield
        return
    if not isinstance(module, FSDPModule):
        yield
        return
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def compute_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype that a forward computes in where no autocast is on."""
    if isinstance(module, FSDP1) and module.mixed_precision.param_dtype is not None:
        return module.mixed_precision.param_dtype
    found = [unit._mp_policy.param_dtype for unit in fsdp2_units(module)]
    return next((dtype for dtype in found if dtype is not None), next(module.parameters()).dtype)


def gradient_dtypes(module: torch.nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtype in which FSDP accumulates micro-batches and the one in which it reduces them, of all units the
    coarsest; (None, None) without FSDP, where gradients are added up in their own dtype."""
    if isinstance(module, FSDP1):
        pairs = [(handle._fwd_bwd_param_dtype, handle._reduce_dtype) for handle in fsdp1_handles(module)]
    else:
        policies = [unit._mp_policy for unit in fsdp2_units(module)]
        reduced = [policy.reduce_dtype or policy.param_dtype or torch.float32 for policy in policies]
        pairs = [(dtype, dtype) for dtype in reduced]  # FSDP2 accumulates in what it reduces in
    coarsest = [max(dtypes, key=lambda dtype: torch.finfo(dtype).eps) for dtypes in zip(*pairs, strict=True)]
    return (coarsest[0], coarsest[1]) if coarsest else (None, None)


def trainable(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return (name, parameter) of all that is trained, each parameter the one that the optimizer has.

    After a forward without a backward (verl's log-probs, with ``reshard_after_forward`` off) FSDP2's module shows
    gathered weights in their place, which the next backward frees.
    """
    gathered = [param for param in fsdp2_params(fsdp2_units(module)) if hasattr(param, "_unsharded_param")]
    shards = {id(param._unsharded_param): param.sharded_param for param in gathered}
    return [(name, shards.get(id(param), param)) for name, param in module.named_parameters() if param.requires_grad]
