# SPDX-License-Identifier: Apache-2.0
"""Code in verl's FSDP workers: the actor's hook, the critic's watch, and the analysis of a batch.

The actor's hook is one object with one method per moment of an update. It calls the localizer and the stabilizers,
where the config switches them on; with both off it changes nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl import DataProto
from verl.utils.device import get_device_id
from verl.workers.actor import BasePPOActor
from verl.workers.critic import BasePPOCritic, dp_critic

from ...analysis.parts import Analysed, measure
from ...config import GradLocConfig
from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...core.step import Outputs
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.messages import Policy
from ...private_api import extended, replaced
from ...reweighting.stages import STAGE_MASK_KEY
from ..verl_common.watch import ActorWatch, Clipping
from .step import ActorStep, AnalysedActorStep, CriticStep

logger = logging.getLogger(__name__)


def build_hook(actor: Any) -> "ActorHook":
    """Return the hook of verl's ``DataParallelPPOActor``, whose config the driver has completed."""
    return ActorHook(actor, actor.config.gradloc)


def ranks_of(actor: Any) -> Ranks:
    """Return the data-parallel ranks of verl's actor."""
    return Ranks(device=get_device_id(), replicas=actor.ulysses_sequence_parallel_size)


class ActorHook(ActorWatch):
    """Hook that verl's ``DataParallelPPOActor`` calls; methods are in the order of their calls."""

    module = property(lambda self: self.actor.actor_module)
    optimizer = property(lambda self: self.actor.actor_optimizer)
    scaler = property(lambda self: self.actor.scaler)
    grad_clip = property(lambda self: self.actor.config.grad_clip)

    def __init__(self, actor: Any, settings: GradLocConfig):
        self.actor = actor
        super().__init__(settings, ranks_of(actor))
        self.is_stage = False
        """Whether this update is one of Lopti's two stages."""
        self.keeps_lr_schedule = False
        """Whether another update of the same step follows it."""
        self._num_without_policy = 0
        self._inputs: Iterator[dict[str, Any]] = iter(())
        """Inputs of the mini-batch's micro-batches that did not run yet."""

    def begin_update(self, data: Any) -> list[str]:
        """Take the policy that came with verl's DataProto; returns the batch keys that the actor must carry along."""
        self.is_stage, policy = STAGE_MASK_KEY in data.batch.keys(), data.meta_info.get(POLICY_KEY)
        if self.localizer is not None and policy is None:
            self._note_missing_policy()
        self.keeps_lr_schedule = policy is not None and policy.keeps_lr_schedule
        self.begin(policy)
        return [key for key in (STAGE_MASK_KEY, ROW_KEY) if key in data.batch.keys()]

    def _note_missing_policy(self) -> None:
        """Log once that nothing is searched, and count: a trainer with a ``fit`` of its own may not call our hook."""
        self._num_without_policy += 1
        if self._num_without_policy == 1 and self.ranks.is_first:
            logger.error(
                "gradloc: spike_detection is on, but this trainer updates the actor without sending a policy, so no "
                "spike will be looked into. Where its fit() calls actor_rollout_wg.update_actor(batch), call "
                "self._update_actor(batch) instead, and self.gradloc.begin_step(batch, logger) once the uids are set, "
                "as RayPPOTrainer.fit does."
            )

    def begin_mini_batch(self, micro_batches: list, temperature: float, on_policy: bool) -> None:
        """Begin a mini-batch, before its first micro-batch."""
        if self.localizer is not None:
            self._inputs = iter([{**each.batch, **each.non_tensor_batch} for each in micro_batches])
            self.step = ActorStep(self.actor, temperature, on_policy, self.ranks.size)
            self.localizer.begin_mini_batch(self.step)

    def before_forward(self) -> None:
        """Record a micro-batch before its forward."""
        if self.step is not None:
            self.step.before_forward(next(self._inputs))

    def after_forward(self, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        """Record a forward's log-probs and entropies, (B, T) both."""
        if self.step is not None:
            self.step.after_forward(Outputs(log_prob, entropy))

    def token_weights(self, model_inputs, log_prob, given, metrics) -> torch.Tensor | None:
        """Return the factors on token losses, of :meth:`~..stabilize.ratio_clip.TokenWeigher.token_weights`."""
        weigher = self.weigher
        return given if weigher is None else weigher.token_weights(model_inputs, log_prob, given, metrics)

    def in_stage(self, values: torch.Tensor, model_inputs: dict[str, Any]) -> torch.Tensor:
        """Return values (B, T) with zeros outside of Lopti's stage, which add nothing to a loss; denominators stay."""
        return values * model_inputs[STAGE_MASK_KEY] if STAGE_MASK_KEY in model_inputs else values

    def clip_by_verl(self) -> torch.Tensor:
        return self.actor._clip_grad_norm()

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add the metrics that are the same on every rank."""
        self.end(metrics)
        if self._num_without_policy:
            metrics["gradloc/updates_without_policy"] = [self._num_without_policy]


class WatchedCritic(BasePPOCritic):
    """Mixin before verl's critic: watches an update that comes with a policy; any other is verl's alone."""

    _watch: "CriticWatch | None" = None

    def update_critic(self, data: Any) -> dict[str, Any]:
        policy = data.meta_info.get(POLICY_KEY)
        if policy is None:
            return super().update_critic(data)
        if self._watch is None:
            self._watch = CriticWatch(self, policy.settings)
        select = data.select  # verl takes the keys that it knows
        data.select = lambda batch_keys, **given: select(batch_keys=[*batch_keys, ROW_KEY], **given)
        with self._watch.update(policy):
            return super().update_critic(data)


class CriticWatch(ActorWatch):
    """Watches a critic's updates; methods are in the order of their calls."""

    scaler, clipping = None, Clipping(dp_critic)
    module = property(lambda self: self.critic.critic_module)
    optimizer = property(lambda self: self.critic.critic_optimizer)
    grad_clip = property(lambda self: self.critic.config.grad_clip)

    def __init__(self, critic: Any, settings: Any):
        self.critic = critic
        super().__init__(settings, Ranks(device=get_device_id()))

    @contextmanager
    def update(self, policy: Policy) -> Iterator[None]:
        """Watch an update that comes with a policy."""
        self.begin(policy)
        try:
            with replaced(self.critic, _forward_micro_batch=self._forward, _optimizer_step=self._optimizer_step):
                yield
        finally:
            self.step = None
            self.end({})

    def _forward(self, micro_batch: dict[str, Any]) -> torch.Tensor:
        if self.step is None:
            self.step = CriticStep(self.critic, self.ranks.size)
            self.localizer.begin_mini_batch(self.step)
        else:
            self.after_backward()  # of the micro-batch before this one
        return self.step.record_forward(micro_batch)

    def _optimizer_step(self) -> torch.Tensor:
        self.after_backward()
        with self.clipping.replaced(self.module, self.before_step):
            return type(self.critic)._optimizer_step(self.critic)


ASKED_KEY = RECORD_KEY = "gradloc_analysis"
"""Key of the request in a batch's meta info, and key of the record among a worker's metrics."""


class _Analysing(BasePPOActor):
    """Mixin before verl's actor: runs an analysis in place of an update where one is asked for.

    The driver asks through verl's own call of an update, which deals the rows out and has the model loaded.
    """

    def update_policy(self, data: DataProto) -> dict[str, Any]:
        if ASKED_KEY not in data.meta_info:
            return super().update_policy(data=data)
        self.gradloc.keeps_lr_schedule = True
        ranks, temperature = ranks_of(self), data.meta_info["temperature"]
        space = GradientSpace(self.actor_module, ranks)

        def prepare() -> Analysed:
            step = AnalysedActorStep(self, data, temperature, ranks)
            optimizer, clip = self.actor_optimizer, self._clip_grad_norm
            return Analysed(step, step.label, space, ranks, optimizer, clip, self.config.grad_clip)

        return {RECORD_KEY: measure(prepare, space, data.meta_info[ASKED_KEY])}


class _Schedule:
    """verl's learning-rate schedule without a step after an analysis or after Lopti's first stage."""

    def __init__(self, scheduler: Any, actor: Any):
        self._scheduler, self._actor = scheduler, actor

    def step(self) -> None:
        if not self._actor.gradloc.keeps_lr_schedule:
            self._scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def watch_actor(worker: Any) -> DataProto:
    """Put the mixin before the actor; runs in each ``ActorRolloutRefWorker`` before its first update."""
    worker.actor.__class__ = extended(type(worker.actor), _Analysing)
    worker.actor_lr_scheduler = _Schedule(worker.actor_lr_scheduler, worker.actor)
    return DataProto()


def watch_critic(worker: Any) -> DataProto:
    """Put the mixin before the critic; runs in each ``CriticWorker``."""
    worker.critic.__class__ = extended(type(worker.critic), WatchedCritic)
    return DataProto()
