# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, stages 1 to 3: the gradient that its optimizer is about to take, and passes of its own engine.

Each process holds a part of the float32 weights, and at the optimizer's step the same part of the gradient. A pass runs
the model, then what the engine runs behind a backward: its own reduction. So a masked gradient is the one that training
without the token would have had. DeepSpeed is not imported: the engine comes from the loop.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..core.engines import EngineSpace, WeightView
from ..core.forward_state import OwnBuffers
from ..core.ranks import Ranks


def is_engine(module: Any) -> bool:
    """Return whether this is DeepSpeed's engine around a model."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed.") for kind in kinds)


class ZeroEngine:
    """One engine with ZeRO, as ``deepspeed.initialize`` returns it: its passes, and its optimizer's gradient."""

    def __init__(self, engine: Any):
        self.engine, self.optimizer, self.module = engine, engine.optimizer, engine.module
        self.is_sharded = hasattr(self.optimizer, "fp16_partitioned_groups_flat")
        """Whether the model's weights are sharded, too (stage 3)."""
        self._space: ZeroSpace | None = None

    def refusal(self) -> str:
        """Return why this engine cannot be watched, in a sentence; empty where it can."""
        optimizer, engine = self.optimizer, self.engine
        stage, kind = engine.zero_optimization_stage(), type(optimizer).__name__
        offloads = [getattr(engine, f"zero_offload_{what}", lambda: None)() for what in ("optimizer", "param")]
        is_offloaded = any(getattr(each, "device", None) not in (None, "none") for each in offloads)
        is_managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
        has_gradients = hasattr(optimizer, "averaged_gradients")
        refused = (
            (stage not in (1, 2, 3), f"ZeRO's stage {stage}: put the model into DistributedDataParallel"),
            (not has_gradients, f"{kind}: leave data_types.grad_accum_dtype out"),
            (engine.fp16_enabled(), "fp16: train in bf16"),
            (is_offloaded, "offload: leave offload_optimizer and offload_param out"),
            (getattr(optimizer, "zenflow", False), "ZenFlow"),
            (getattr(engine, "has_moe_layers", False), "its own experts"),
            (getattr(engine, "pipeline_parallelism", False), "its pipeline"),
            (not is_managed, "managed_gradient_accumulation=false"),
        )
        found = next((what for is_there, what in refused if is_there), "")
        return found and f"gradloc does not look into DeepSpeed with {found}"

    @property
    def clip_limit(self) -> float:
        """The norm that the optimizer's step clips to; inf: it does not clip."""
        return float(self.optimizer.clip_grad) or float("inf")

    divisor: int | None = None
    """What the sum over ranks is divided by, where that is not their number."""

    def make_space(self, ranks: Ranks) -> "ZeroSpace":
        """Return the trained parameters, at each step the same."""
        if self._space is None:
            self._space = ZeroSpace(self, ranks)
        return self._space

    # ---- the optimizer's step

    def on_step(self, check: Callable[[], None]) -> None:
        """Wrap the optimizer's step: call ``check`` first, and take no step if ``check`` left no gradient."""
        take_step = self.optimizer.step

        def step(*args: Any, **given: Any) -> Any:
            check()
            if any(gradients is not None for gradients in self.optimizer.averaged_gradients.values()):
                return take_step(*args, **given)
            self.reset()
            if self.is_sharded:
                self.optimizer._pre_step()
            return None

        self.optimizer.step = step

    def reset(self) -> None:
        """Drop what the backwards so far have left."""
        optimizer = self.optimizer
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None
        if self.is_sharded:
            optimizer.grad_partitions_flat_buffer.zero_()
        else:
            optimizer.micro_step_id = -1
            optimizer.all_grad_tensors = dict.fromkeys(optimizer.all_grad_tensors)
        optimizer.zero_grad()

    # ---- a pass

    @contextmanager
    def in_pass(self, is_last: bool) -> Iterator[None]:
        """Surround the forward and the backward of a micro-batch with what the engine does around training's."""
        engine, optimizer = self.engine, self.optimizer
        boundary = engine._is_gradient_accumulation_boundary
        optimizer.clear_backward_seen_flag()
        engine.set_gradient_accumulation_boundary(is_last)
        try:
            yield
            engine.allreduce_gradients()
            optimizer.backward_epilogue()
        finally:
            engine._is_gradient_accumulation_boundary = boundary

    @contextmanager
    def whole(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Make these modules' weights readable on each process in here."""
        params: list[Any] = [param for module in modules for param in module.parameters()] if self.is_sharded else []
        missing = [param for param in params if param.ds_status.name == "NOT_AVAILABLE"]
        if missing:
            missing[0].all_gather(param_list=missing)
        try:
            yield
        finally:
            if missing:
                missing[0].partition(param_list=missing, has_been_updated=False)


class ZeroSpace(EngineSpace):
    """The trained weights and gradients of a ZeRO optimizer. All ranks construct it together."""

    def __init__(self, zero: ZeroEngine, ranks: Ranks | None = None):
        self.zero, self.module, self.model = zero, zero.module, zero.module
        self._buffers = [OwnBuffers(owner) for owner in self.model.modules() if owner._buffers]
        optimizer = zero.optimizer
        groups = _parts(zero)
        parts = {id(param): part for group in groups for param, part in group}
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        empty = next(iter(parts.values())).detach()[:0]  # of a parameter that this process holds no part of
        named = [(name, parts[id(param)] if id(param) in parts else WeightView.over(empty)) for name, param in trained]
        places = {id(param): index for index, (_, param) in enumerate(trained)}
        self._order = [[places[id(param)] for param, _ in group] for group in groups]
        """Indices of each optimizer group's parameters, in the order of the optimizer's gradients."""
        self._held: dict[int, Any] = {}
        """The optimizer's gradient by group, while a step is looked into."""
        group = optimizer.dp_process_group
        dtypes = getattr(optimizer, "gradient_accumulation_dtype", None), optimizer.communication_data_type
        self._hold(named, [] if dist.get_world_size(group) == 1 else [group], dtypes, ranks)
        self.is_mirrored = any(param.dtype != torch.float32 for _, param in trained)

    @property
    def device(self) -> torch.device:
        return torch.device(self.zero.engine.device)

    def buffers(self) -> set[int]:
        sharded = [self.zero.optimizer.grad_partitions_flat_buffer] if self.zero.is_sharded else []
        return {buffer.untyped_storage().data_ptr() for buffer in sharded}

    def clear(self) -> None:
        super().clear()
        self.zero.reset()

    def show(self) -> None:
        """Load into ``.grad`` what the optimizer is about to take."""
        there = self.zero.optimizer.averaged_gradients
        self._held = {group: entries for group, entries in there.items() if entries is not None}
        for param, entry in self._held_parts():
            param.grad = entry.view(-1)[: param.numel()]

    @torch.no_grad()
    def give(self) -> None:
        """Write ``.grad`` where the optimizer's step reads it; where there is none, drop the gradient, so that no step
        is taken."""
        if self._held and all(param.grad is None for param in self.params):
            self.zero.reset()
        else:
            for param, entry in self._held_parts():
                flat = entry.view(-1)
                if param.grad is None:
                    flat.zero_()
                elif param.grad.data_ptr() != entry.data_ptr():  # else show has made it a view of the entry
                    flat[: param.numel()].copy_(param.grad.view(-1))
            self.zero.optimizer.averaged_gradients.update(self._held)
        self._held = {}
        super().clear()

    def _held_parts(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield parameters with the optimizer's gradient of this process' part, without DeepSpeed's padding."""
        for group, entries in self._held.items():
            real = [entry for entry in entries if not getattr(entry, "_zero_padding", False)]
            for index, entry in zip(self._order[group], real, strict=False):
                yield self.params[index], entry

    @torch.no_grad()
    def publish(self) -> None:
        optimizer = self.zero.optimizer
        if not self.zero.is_sharded:
            optimizer.update_lp_params()
            for group in range(len(optimizer.bit16_groups)):
                optimizer._update_model_bit16_weights(group)
            return
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def abandon_pass(self) -> None:
        optimizer = self.zero.optimizer
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        already = optimizer.params_already_reduced
        for param in already if isinstance(already, dict) else range(len(already)):
            already[param] = False
        if self.zero.is_sharded:
            optimizer._partition_all_parameters()
        else:
            optimizer._release_ipg_buffers()
        self.zero.reset()


def _parts(zero: ZeroEngine) -> list[list[tuple[torch.nn.Parameter, WeightView]]]:
    """Return a list for each optimizer group, in the order of the gradients: (parameter, this process' part)."""
    optimizer = zero.optimizer
    if zero.is_sharded:
        return [[(param, _sharded_part(optimizer, param)) for param in group] for group in optimizer.fp16_groups]
    found = []
    for group, params in enumerate(optimizer.params_in_partition):
        weights = optimizer.single_partition_of_fp32_groups[group]
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        parts = []
        for param in params:
            number = optimizer.get_param_id(param)
            start = int(optimizer.grad_partition_insertion_offset[group][rank][number])
            size = int(param.numel() - optimizer.grad_start_offset[group][rank][number])
            parts.append((param, WeightView.over(weights[start : start + min(size, len(weights) - start)])))
        found.append(parts)
    return found


def _sharded_part(optimizer: Any, param: Any) -> WeightView:
    """Return this process' part of a stage-3 parameter, without the padding of the last process."""
    group, start, size = optimizer.grad_position[optimizer.get_param_id(param)]
    rank = dist.get_rank(param.ds_process_group)
    real = min(max(param.ds_numel - rank * size, 0), size)
    return WeightView.over(optimizer.fp32_partitioned_groups_flat[group][start : start + real])
