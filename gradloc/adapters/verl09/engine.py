# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine with a localizer riding along; registered by :mod:`.config`, only in a run that asks for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...keys import POLICY_KEY
from ...loop.localizer import Localizer
from ...loop.wire import Policy
from ..verl_common.reports import answer
from ..verl_common.weights import save_event_weights
from .step import EngineStep

__all__ = ["GradLocEngine", "Watched", "register_engine", "report_of_actor", "report_of_model"]

_STRATEGIES = ("fsdp", "fsdp2")


class Watched:
    """Goes in front of verl's engine; a mini-batch that comes with a policy is watched, any other goes through verl's
    code alone."""

    _watch: "EngineWatch | None" = None
    step_class: type[EngineStep] = EngineStep

    def train_batch(self, data: Any, loss_function: Callable) -> Any:
        policy = tu.get_non_tensor_data(data=data, key=POLICY_KEY, default=None)
        if policy is None:
            return super().train_batch(data, loss_function)
        if self._watch is None:
            self._watch = EngineWatch(self, policy.settings)
        with self._watch.mini_batch(policy, loss_function):
            return super().train_batch(data, loss_function)

    def forward_step(self, micro_batch: Any, loss_function: Callable, forward_only: bool) -> Any:
        if self._watch is None or not self._watch.is_open or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)
        return super().forward_step(micro_batch, self._watch.before_forward(micro_batch, loss_function), forward_only)

    def optimizer_step(self) -> float:
        if self._watch is None or not self._watch.is_open:
            return super().optimizer_step()
        with self._watch.around_clip():
            return super().optimizer_step()


class GradLocEngine(Watched, FSDPEngineWithLMHead):
    """verl's engine of the actor."""


class EngineWatch:
    """What the engine calls, in the order of the methods; also the actor's powers for the localizer.

    Args:
        engine: verl's.
        settings: those that hold.
    """

    def __init__(self, engine: Any, settings: Any):
        self.engine, self.settings = engine, settings
        ranks = Ranks(device=_device(), replicas=engine.ulysses_sequence_parallel_size)
        self.localizer = Localizer(self, ranks, settings)
        self._step: EngineStep | None = None
        self._update = -1
        self._num_left = 0
        self._clip = partial(_clip, engine)

    @property
    def is_open(self) -> bool:
        """Whether a mini-batch is being watched."""
        return self._step is not None

    @contextmanager
    def mini_batch(self, policy: Policy, loss_function: Any) -> Iterator[None]:
        """Around a mini-batch; each comes with its update's policy."""
        found = self.localizer
        if policy.update != self._update:
            self._update, self._num_left = policy.update, len(policy.thresholds)
            found.begin_update(policy, GradientSpace(self.engine.module, found.ranks))
        self._step = self.engine.step_class(self.engine, loss_function, found.ranks.size)
        found.begin_mini_batch(self._step)
        try:
            yield
        finally:
            self._step = None
        self._num_left -= 1
        if self._num_left == 0:
            found.end_update()

    def before_forward(self, micro_batch: Any, loss_function: Callable) -> Callable:
        """Before a micro-batch's forward; returns the loss function to call after it."""
        step = self._step
        assert step is not None
        if step.num_micro_batches and not _reduces_once(self.engine):
            self.localizer.after_backward()  # of the one before
        step.before_forward(micro_batch)

        def watched(model_output: dict[str, torch.Tensor], **given: Any) -> Any:
            step.after_forward(model_output)
            return loss_function(model_output=model_output, **given)

        return watched

    @contextmanager
    def around_clip(self) -> Iterator[None]:
        """While verl clips and steps: look in between, with the norm that verl's own clipping has measured."""
        self.localizer.after_backward()
        with _clipping_replaced(self.engine, self._clip_and_look):
            yield

    def _clip_and_look(self) -> torch.Tensor:
        norm = self.localizer.before_step(self.clip())
        self._step = None
        return norm

    # ---- the actor's powers: see loop.localizer.ActorPowers

    takes_what_is_not_finite = False

    @property
    def clip_limit(self) -> float:
        return self.engine.optimizer_config.clip_grad

    @property
    def scales_loss(self) -> bool:
        return self.engine.scaler is not None

    def clip(self) -> torch.Tensor:
        return self._clip()

    def save_weights(self, global_step: int) -> str | None:
        return save_event_weights(self.engine.module, self.settings, global_step, self.localizer.ranks)


def _device() -> Any:
    return "cpu" if get_device_name() == "cpu" else get_device_id()


def _reduces_once(engine: Any) -> bool:
    """Whether gradients are reduced over ranks after the last micro-batch only."""
    return getattr(engine.engine_config, "use_no_sync_for_gradient_accumulation", True)


def _clip(engine: Any) -> torch.Tensor:
    """verl's own clipping; the norm before it, a scalar."""
    limit = engine.optimizer_config.clip_grad
    if isinstance(engine.module, FSDP1):
        norm = type(engine.module).clip_grad_norm_(engine.module, limit)
    else:
        norm = _FSDP2_CLIP(engine.module.parameters(), max_norm=limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


_FSDP2_CLIP = transformer_impl.fsdp2_clip_grad_norm_


@contextmanager
def _clipping_replaced(engine: Any, clip: Callable[[], torch.Tensor]) -> Iterator[None]:
    """verl's ``optimizer_step`` clips by one of these two names, and then steps."""
    if isinstance(engine.module, FSDP1):
        engine.module.clip_grad_norm_ = lambda max_norm: clip()
        try:
            yield
        finally:
            del engine.module.clip_grad_norm_
        return
    transformer_impl.fsdp2_clip_grad_norm_ = lambda parameters, max_norm: clip()
    try:
        yield
    finally:
        transformer_impl.fsdp2_clip_grad_norm_ = _FSDP2_CLIP


def report_of_actor(worker: Any) -> DataProto:
    """What verl's ``ActorRolloutRefWorker`` has to say of the last update."""
    return report_of_model(worker.actor)


def report_of_model(worker: Any) -> DataProto:
    """What verl's ``TrainingWorker`` has to say; nothing where its engine is not ours."""
    watch = getattr(worker.engine, "_watch", None)
    return answer(None if watch is None else watch.localizer.report())


def register_engine() -> None:
    """Put our engine in the place of verl's here: (device, vendor) is looked up before the device alone."""
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    for strategy in _STRATEGIES:
        if EngineRegistry.get_engine_cls("language_model", strategy) is not GradLocEngine:
            EngineRegistry.register("language_model", strategy, device=device, vendor=vendor)(GradLocEngine)
