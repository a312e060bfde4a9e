# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine with what is on riding along; the trainer puts it into its workers where a run asks for it."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor

from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...keys import POLICY_KEY
from ...loop.localizer import Localizer
from ...loop.wire import Policy, RankReport
from ...stabilize.ratio_clip import TokenWeigher
from ...stabilize.stabilizer import Stabilizer
from ..verl_common.reports import answer
from ..verl_common.weights import save_event_weights
from .analysis.engine import ASKED_KEY, analyze
from .loss import weighed, within_stage
from .step import EngineStep, device_of

__all__ = ["GradLocEngine", "Watched", "WatchedFSDP", "report_of_actor", "report_of_model", "watch_actor"]


class EngineWatch:
    """What the engine calls, in the order of the methods; also the actor's powers for the localizer.

    Args:
        engine: verl's.
        settings: those that hold.
    """

    def __init__(self, engine: Any, settings: Any):
        self.engine, self.settings = engine, settings
        self.ranks = self._make_ranks()
        self.localizer = Localizer(self, self.ranks, settings) if settings.enable else None
        self.stabilizer = (
            Stabilizer(settings.stabilize, engine.optimizer_config.clip_grad) if settings.stabilize.is_on else None
        )
        self.is_open = self.keeps_lr_schedule = False
        """Whether a mini-batch is being watched; whether the update is followed by another of the same step."""
        self._found: dict[str, Any] = {}
        self.step: EngineStep | None = None
        """The mini-batch whose forwards are recorded, for a search."""
        self._update = -1
        self._num_left = 0

    @contextmanager
    def mini_batch(self, policy: Policy, loss_function: Any) -> Iterator[Callable]:
        """Around a mini-batch, which comes with its update's policy; gives the loss function to train with."""
        if policy.update != self._update:
            self._begin_update(policy)
        weigher = None if self.stabilizer is None else self.stabilizer.weigher
        of_training = of_search = loss_function
        if weigher is not None:
            of_training, of_search = (weighed(loss_function, weigher, to) for to in (self.stabilizer.note, _forget))
        if policy.stage is not None:
            of_training, of_search = within_stage(of_training), within_stage(of_search)
        if self.localizer is not None:
            self.step = self.engine.step_class(self.engine, of_search, self.ranks.size)
            self.localizer.begin_mini_batch(self.step)
        self.is_open = True
        try:
            yield of_training
        finally:
            self.step, self.is_open = None, False
        self._num_left -= 1
        if self._num_left == 0:
            self._end_update()

    def before_forward(self, micro_batch: Any, loss_function: Callable) -> Callable:
        """Before a micro-batch's forward; returns the loss function to call after it."""
        step = self.step
        assert step is not None and self.localizer is not None
        if step.num_micro_batches and not step.reduces_once:
            self.localizer.after_backward()  # of the one before
        step.before_forward(micro_batch)

        def watched(model_output: dict[str, torch.Tensor], **given: Any) -> Any:
            step.after_forward(model_output)
            return loss_function(model_output=model_output, **given)

        return watched

    @contextmanager
    def around_clip(self) -> Iterator[None]:
        """While verl clips and steps: look in between, with the norm that verl's own clipping has measured."""
        if self.localizer is not None and self.notes_running_norms:
            self.localizer.after_backward()
        with self._clipping_replaced():
            yield

    def _before_step(self) -> torch.Tensor:
        norm = self.clip()
        if self.localizer is not None:
            norm = self.localizer.before_step(norm)
            self.step = None
        return norm if self.stabilizer is None else self.stabilizer.before_step(norm)

    def report(self) -> RankReport:
        """What this process has to say of the last update."""
        learned = None if self.stabilizer is None else self.stabilizer.state()
        if self.localizer is None:
            report = RankReport(self.ranks.process, learned=learned)
        else:
            report = self.localizer.report(learned)
        return replace(report, metrics=self._found)

    # ---- the actor's powers: see loop.localizer.ActorPowers

    takes_what_is_not_finite = False
    notes_running_norms = True
    """Whether ``.grad`` is added to by each micro-batch's backward."""

    @property
    def clip_limit(self) -> float:
        return math.inf if self._measures_only else self.engine.optimizer_config.clip_grad

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    @property
    def scales_loss(self) -> bool:
        return self.engine.scaler is not None

    def clip(self) -> torch.Tensor:
        return self.stabilizer.measure() if self._measures_only else self._clip()

    def save_weights(self, global_step: int) -> str | None:
        return save_event_weights(self.engine.module, self.settings, global_step, self.ranks)

    # ---- inside

    @property
    def _measures_only(self) -> bool:
        return self.stabilizer is not None and self.stabilizer.clips_layers

    def _begin_update(self, policy: Policy) -> None:
        self._update, self._num_left = policy.update, len(policy.thresholds)
        self.keeps_lr_schedule, self._found = policy.keeps_lr_schedule, {}
        space = self._make_space()
        if self.localizer is not None:
            self.localizer.begin_update(policy, space)
        if self.stabilizer is not None:
            self.stabilizer.begin_update(space, policy.stage or "", policy.learned)

    # ---- what differs by engine

    def _make_ranks(self) -> Ranks:
        return Ranks(device=device_of(), replicas=self.engine.ulysses_sequence_parallel_size)

    def _make_space(self) -> GradientSpace:
        return GradientSpace(self.engine.module, self.ranks)

    def _clip(self) -> torch.Tensor:
        return _clip(self.engine)

    def _clipping_replaced(self) -> AbstractContextManager[None]:
        return _clipping_replaced(self.engine, self._before_step)

    def _end_update(self) -> None:
        if self.localizer is not None:
            self.localizer.end_update()
        if self.stabilizer is not None:
            self.stabilizer.end_update(self._found)


class Watched:
    """Goes in front of verl's engine; a mini-batch that comes with a policy is watched, any other goes through verl's
    code alone."""

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

    def lr_scheduler_step(self) -> float:
        if self._watch is not None and self._watch.keeps_lr_schedule:
            return self.lr_scheduler.get_last_lr()[0]
        return super().lr_scheduler_step()


class WatchedFSDP(Watched):
    """Of FSDP, which runs a forward and the loss of one micro-batch in one method."""

    def forward_step(self, micro_batch: Any, loss_function: Callable, forward_only: bool) -> Any:
        if self._watch is None or self._watch.step is None or forward_only:
            return super().forward_step(micro_batch, loss_function, forward_only)
        return super().forward_step(micro_batch, self._watch.before_forward(micro_batch, loss_function), forward_only)


class GradLocEngine(WatchedFSDP, FSDPEngineWithLMHead):
    """verl's engine of the actor; asked for an analysis of a batch, it does that in place of verl's forward."""

    analysis_record: Any = None
    """What the last analysis found on this rank."""

    def infer_batch(self, data: Any, loss_function: Callable | None = None) -> Any:
        asked = tu.get_non_tensor_data(data=data, key=ASKED_KEY, default=None)
        if asked is None:
            return super().infer_batch(data, loss_function)
        assert loss_function is not None, "an analysis is of training's loss"
        stabilize = asked.settings.stabilize
        if stabilize.weighs_tokens:
            loss_function = weighed(loss_function, TokenWeigher(stabilize), _forget)
        self.analysis_record = analyze(self, data, loss_function, partial(_clip, self), asked.request)
        return {"model_output": {}, "loss": [], "metrics": {}}


def _forget(metrics: Any) -> None:
    """What a probe's clips did is what the training pass' have done."""


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


def watch_actor(worker: Any) -> DataProto:
    """Runs in each of the actor's workers, once it is built: its engine is ours from here on.

    Args:
        worker: verl's ``ActorRolloutRefWorker``.
    """
    engine = worker.actor.engine
    if engine.engine_config.strategy == "megatron":
        from .megatron.engine import GradLocMegatronEngine  # Megatron is there with that engine alone

        engine.__class__ = GradLocMegatronEngine
    else:
        engine.__class__ = GradLocEngine
    return DataProto()


def report_of_actor(worker: Any) -> DataProto:
    """What verl's ``ActorRolloutRefWorker`` has to say of the last update."""
    return report_of_model(worker.actor)


def report_of_model(worker: Any) -> DataProto:
    """What verl's ``TrainingWorker`` has to say."""
    return answer(worker.engine._watch.report())
