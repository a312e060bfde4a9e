# SPDX-License-Identifier: Apache-2.0
"""Add spikes, stabilizers and analyses to verl's FSDP engine, in the workers of a run that switches one on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp import transformer_impl

from ...analysis.parts import Analysed, measure
from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...keys import POLICY_KEY
from ...loop.messages import Policy, RankReport
from ...private_api import extended
from ...stabilize.ratio_clip import TokenWeigher
from ..verl_common.watch import ActorWatch, Clipping
from .step import AnalysedEngineStep, EngineCriticStep, EngineStep, reset_offloading, with_token_weights, within_stage

CLIPPING = Clipping(transformer_impl)


class EngineWatch(ActorWatch):
    """Watches an engine's updates; methods are in the order of their calls."""

    clipping = CLIPPING
    module = property(lambda self: self.engine.module)
    optimizer = property(lambda self: self.engine.optimizer)
    scaler = property(lambda self: self.engine.scaler)
    grad_clip = property(lambda self: self.engine.optimizer_config.clip_grad)

    def __init__(self, engine: Any, settings: Any):
        self.engine = engine
        super().__init__(settings, self._make_ranks())
        self.is_open = self.keeps_lr_schedule = False
        """``is_open``: a mini-batch is being watched. ``keeps_lr_schedule``: another update of this step follows."""
        self._metrics: dict[str, Any] = {}
        self._update: int | None = None
        self._num_left = 0

    @contextmanager
    def mini_batch(self, policy: Policy, loss_function: Any) -> Iterator[Callable]:
        """Watch a mini-batch, which comes with its update's policy; yields the loss function to train with."""
        if policy.update != self._update:
            self._update, self._num_left = policy.update, len(policy.thresholds)
            self.keeps_lr_schedule, self._metrics = policy.keeps_lr_schedule, {}
            self.begin(policy)
        training_loss = search_loss = loss_function
        if self.weigher is not None:
            training_loss = with_token_weights(loss_function, self.weigher, self.stabilizer.note)
            search_loss = with_token_weights(loss_function, self.weigher, _forget)
        if policy.stage is not None:
            training_loss, search_loss = within_stage(training_loss), within_stage(search_loss)
        if self.localizer is not None:
            self.step = self.engine.step_class(self.engine, search_loss, self.ranks.size)
            self.localizer.begin_mini_batch(self.step)
        self.is_open = True
        try:
            yield training_loss
        finally:
            self.step, self.is_open = None, False
        self._num_left -= 1
        if self._num_left == 0:
            self.end(self._metrics)

    def before_forward(self, micro_batch: Any, loss_function: Callable) -> Callable:
        """Record a micro-batch before its forward; returns the loss function to call after it."""
        step = self.step
        assert self.localizer is not None
        if step.num_micro_batches and not step.reduces_once:
            self.localizer.after_backward()  # of the one before
        step.before_forward(micro_batch)

        def recording(model_output: dict[str, torch.Tensor], **kwargs: Any) -> Any:
            step.record_output(model_output)
            return loss_function(model_output=model_output, **kwargs)

        return recording

    def around_clip(self) -> AbstractContextManager[None]:
        """Return a context for verl's clipping and step that looks in between."""
        self.after_backward()
        return self.clipping.replaced(self.module, self.before_step)

    def report(self) -> RankReport:
        return replace(super().report(), metrics=self._metrics)

    def _make_ranks(self) -> Ranks:
        return Ranks(device=get_device_id(), replicas=self.engine.ulysses_sequence_parallel_size)


class WatchedEngine:
    """Mixed in before verl's engine: watches a mini-batch that comes with a policy; any other is verl's alone."""

    _watch: EngineWatch | None = None
    step_class: type[EngineStep] = EngineStep
    watch_class: type[EngineWatch] = EngineWatch

    def train_batch(self, data: Any, loss_function: Callable) -> Any:
        policy = tu.get_non_tensor_data(data=data, key=POLICY_KEY, default=None)
        if policy is None:
            return super().train_batch(data, loss_function)
        if self._watch is None:
            self._watch = self.watch_class(self, policy.settings)
        with self._watch.mini_batch(policy, loss_function) as loss_with_parts:
            return super().train_batch(data, loss_with_parts)

    def optimizer_step(self) -> float:
        if self._watch is None or not self._watch.is_open:
            return super().optimizer_step()
        with self._watch.around_clip():
            return super().optimizer_step()

    def lr_scheduler_step(self) -> Any:
        if self._watch is not None and self._watch.keeps_lr_schedule:
            return self._last_lr()
        return super().lr_scheduler_step()

    def _last_lr(self) -> Any:
        return self.lr_scheduler.get_last_lr()[0]


class WatchedFSDP(WatchedEngine):
    """Mixed in before verl's FSDP engine, which runs a micro-batch's forward and loss in one method."""

    def plain_forward_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's own forward step, and record nothing."""
        return super().forward_step(*args, **kwargs)

    def forward_step(self, micro_batch: Any, loss_function: Callable, forward_only: bool) -> Any:
        if self._watch is not None and not forward_only:
            reset_offloading(self)
            if self._watch.step is not None:
                loss_function = self._watch.before_forward(micro_batch, loss_function)
        return super().forward_step(micro_batch, loss_function, forward_only)


class GradLocEngine(WatchedFSDP):
    """Mixed in before the actor's engine: runs an analysis in place of a forward where the trainer requests one."""

    analysis_record: Any = None
    """Measurements of the last analysis on this rank."""

    def infer_batch(self, data: Any, loss_function: Callable | None = None) -> Any:
        requested = tu.get_non_tensor_data(data=data, key=ASKED_KEY, default=None)
        if requested is None:
            return super().infer_batch(data, loss_function)
        assert loss_function is not None, "an analysis is of training's loss"
        stabilize = requested.settings.stabilize
        if stabilize.weighs_tokens:
            loss_function = with_token_weights(loss_function, TokenWeigher(stabilize), _forget)
        self.analysis_record = analyse(self, data, loss_function, requested.request)
        return {"model_output": {}, "loss": [], "metrics": {}}


class GradLocValueEngine(WatchedFSDP):
    """Mixed in before the critic's engine."""

    step_class = EngineCriticStep


def _forget(metrics: Any) -> None:
    """Drop a replay's clip metrics; training reported them."""


def watch_actor(worker: Any) -> DataProto:
    """Put the mixin before the actor's engine; runs in each ``ActorRolloutRefWorker`` before the first rollout.

    Raises:
        RuntimeError: one sentence, for a Megatron layout that was never tested.
    """
    engine, kind = worker.actor.engine, GradLocEngine
    if engine.engine_config.strategy == "megatron":
        from .megatron.engine import GradLocMegatronEngine, check  # Megatron is there with that engine alone

        check(engine)
        kind = GradLocMegatronEngine
    engine.__class__ = extended(type(engine), kind)
    return DataProto()


def watch_critic(worker: Any) -> DataProto:
    """Put the mixin before the critic's engine; runs in each ``TrainingWorker``."""
    worker.engine.__class__ = extended(type(worker.engine), GradLocValueEngine)
    return DataProto()


ASKED_KEY = "gradloc_analysis"
"""Key of a batch's meta info, of an :class:`AnalysisRequest`."""


@dataclass(frozen=True)
class AnalysisRequest:
    """An analysis that the trainer requests of every rank."""

    request: dict[str, Any]
    """Request of :func:`~...analysis.parts.measure`."""
    settings: Any
    """Settings of the run."""


def analyse(engine: Any, data: Any, loss_function: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Analyse this rank's rows (``data``) by :func:`~...analysis.parts.measure`."""
    ranks, limit = Ranks(device=get_device_id()), engine.optimizer_config.clip_grad
    space = GradientSpace(engine.module, ranks)

    def make() -> Analysed:
        step = AnalysedEngineStep(engine, loss_function, data, ranks)
        clip = partial(CLIPPING.clip, engine.module, limit)
        return Analysed(step, step.label, space, ranks, engine.optimizer, clip, limit)

    return measure(make, space, request)
