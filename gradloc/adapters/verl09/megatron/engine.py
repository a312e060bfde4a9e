# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine that watches its updates; the trainer puts it into its workers if a run asks for it."""

from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer

from verl.utils.device import get_device_id
from verl.utils.megatron.optimizer import get_megatron_last_lr

from ....core.ranks import Ranks
from ....private_api import replaced
from ....watch.megatron import MegatronSpace, clip_as_megatron, leaves_of
from ...verl_common.requirements import needed_of_megatron
from ..engine import EngineWatch, WatchedEngine
from .step import MegatronStep


class MegatronWatch(EngineWatch):
    """Watches an engine's updates, as :class:`~..engine.EngineWatch` does."""

    takes_what_is_not_finite = True
    scaler = None

    def __init__(self, engine: Any, settings: Any):
        self._space: MegatronSpace | None = None
        super().__init__(engine, settings)

    @property
    def grad_clip(self) -> float:
        """Megatron's own limit; override_optimizer_config may make it another than verl's."""
        return leaves_of(self.engine.optimizer)[0].config.clip_grad

    @property
    def clip_limit(self) -> float:
        return super().clip_limit or float("inf")  # 0: Megatron clips nothing

    @property
    def optimizer(self) -> Any:
        """One view of all leaves' states: experts have an Adam of their own."""
        states = [leaf.optimizer.state for leaf in leaves_of(self.engine.optimizer)]
        return SimpleNamespace(state=ChainMap(*states))

    def _make_ranks(self) -> Ranks:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.engine.get_data_parallel_rank())
        replicas = len(everyone) // self.engine.get_data_parallel_size()
        is_in_step = parallel_state.get_pipeline_model_parallel_world_size() == 1
        return Ranks(device=get_device_id(), replicas=replicas, rank_of=everyone, is_in_step=is_in_step)

    def make_space(self, ranks: Ranks | None) -> MegatronSpace:
        if self._space is None:
            self._space = MegatronSpace(self.engine.module, self.engine.optimizer, self.ranks)
        return self._space

    def clip_by_verl(self) -> torch.Tensor:
        """Clip as Megatron does; returns the norm before, a scalar."""
        return torch.tensor(clip_as_megatron(self.engine.optimizer), dtype=torch.float64)

    @contextmanager
    def around_clip(self) -> Iterator[None]:
        """Look in between clipping and step: Megatron's step asks once for the norm, clips by it, and then steps."""
        optimizer = self.engine.optimizer
        configs = {id(leaf.config): leaf.config for leaf in leaves_of(optimizer)}.values()
        limits = [config.clip_grad for config in configs]

        def get_grad_norm() -> float:
            with torch.enable_grad():  # which a step is without, and a search has backwards
                norm = float(self.before_step())
            for config in configs:
                config.clip_grad = 0.0
            return norm

        def step_with_ready_grads() -> bool:
            if all(grad is None for grad in self.make_space(self.ranks).current()):
                return True  # the optimizer on the CPU would take the last step's gradient again
            return type(optimizer).step_with_ready_grads(optimizer)

        try:
            with replaced(optimizer, get_grad_norm=get_grad_norm, step_with_ready_grads=step_with_ready_grads):
                yield
        finally:
            for config, limit in zip(configs, limits, strict=True):
                config.clip_grad = limit


class GradLocMegatronEngine(WatchedEngine):
    """Mixin before verl's Megatron engine of the actor."""

    step_class, watch_class = MegatronStep, MegatronWatch

    @property
    def _step(self) -> MegatronStep | None:
        return None if self._watch is None else self._watch.step

    def forward_backward_batch(self, *args: Any, **given: Any) -> Any:
        with nullcontext() if self._step is None else self._step.dividing():
            return super().forward_backward_batch(*args, **given)

    def forward_step(self, batch_iter: Iterator[Any], *args: Any, **given: Any) -> Any:
        if self._step is not None:
            batch = next(batch_iter)
            self._step.before_forward(batch)
            batch_iter = iter([batch])
        return super().forward_step(batch_iter, *args, **given)

    def postprocess_micro_batch_func(
        self, output: Any, data: Any, forward_only: bool, loss_function: Callable | None, local_cp_size: Any = None
    ) -> Any:
        original, step = super().postprocess_micro_batch_func, self._step
        if step is None:
            return original(output, data, forward_only, loss_function, local_cp_size)
        try:
            return original(step.after_output(output, data), data, forward_only, loss_function, local_cp_size)
        except Exception as error:
            if not step.is_replaying:
                raise
            step.failed(error)
            return 0.0 * output[step.output].values().sum(), {}

    def _last_lr(self) -> Any:
        return get_megatron_last_lr(self.optimizer)


def check(engine: Any) -> None:
    """Refuse layouts that were never tested and that only the engine knows.

    Raises:
        RuntimeError: one sentence.
    """
    config, ddp = engine.tf_config, engine.module[0].ddp_config
    optimizer_config = leaves_of(engine.optimizer)[0].config
    balancing = config.moe_router_load_balancing_type
    balancing = {balancing} if isinstance(balancing, str) else set(balancing)
    has_router_loss = bool(config.num_moe_experts and (config.moe_z_loss_coeff or balancing != {"none"}))
    refused = {
        **{
            name: getattr(of, name, value) != value
            for block, of in (("override_transformer_config", config), ("override_ddp_config", ddp))
            for name, value in needed_of_megatron(block).items()
        },
        "moe_token_dispatcher_type=flex": config.moe_token_dispatcher_type == "flex",
        "this moe_router_load_balancing_type": bool(balancing & {"sinkhorn", "global_aux_loss"}),
        "a router's loss in an interleaved pipeline": has_router_loss and len(engine.module) > 1,
        "a precision-aware optimizer that is not on the CPU (optimizer_cpu_offload)": (
            optimizer_config.use_precision_aware_optimizer and not optimizer_config.optimizer_cpu_offload
        ),
        "main_grads_dtype in 16 bits": optimizer_config.main_grads_dtype != torch.float32,
        "an optimizer that is not Megatron's ChainedOptimizer": not isinstance(engine.optimizer, ChainedOptimizer),
    }
    for what, is_there in refused.items():
        if is_there:
            raise RuntimeError(
                f"gradloc was not run with {what} on Megatron, and this run has that: leave +gradloc out, or train "
                "with strategy=fsdp2 (docs/megatron.md)."
            )
