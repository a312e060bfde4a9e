# SPDX-License-Identifier: Apache-2.0
"""What verl's actor calls: one object, one method per moment of an update.

Behind it are the parts that the configuration switches on: the localizer and the stabilizers. With none of them, the
hook does nothing and changes nothing. A stage of Lopti's, which the trainer decides on, it recognizes by the batch.
"""

import logging
import math
from typing import Any

import torch

from verl.utils.device import get_device_id

from ...core.gradients import GradientSpace
from ...core.ranks import Ranks
from ...keys import POLICY_KEY, ROW_KEY
from ...loop.localizer import Localizer
from ...loop.wire import RankReport
from ...reweighting import STAGE_MASK_KEY, STAGE_NAME_KEY
from ...stabilize import STABILIZER_KEY
from ...stabilize.ratio_clip import TokenWeigher
from ...stabilize.stabilizer import Stabilizer
from ..verl_common.weights import save_event_weights
from .step import ActorStep

logger = logging.getLogger(__name__)


def build_hook(actor: Any) -> "ActorHook":
    """The hook of verl's ``DataParallelPPOActor``; it does nothing for a reference policy and while all is off."""
    hook = ActorHook(actor)
    if actor.actor_optimizer is None:
        return hook
    config = actor.config
    if config.gradloc.stabilize.is_on:
        hook.stabilizer = Stabilizer(config.gradloc.stabilize, config.grad_clip)
        hook.weigher = hook.stabilizer.weigher
    if config.gradloc.enable:
        hook.localizer = Localizer(_Powers(hook), ranks_of(actor), config.gradloc)
    return hook


def ranks_of(actor: Any) -> Ranks:
    """The data-parallel ranks of verl's actor."""
    device = get_device_id() if actor.device_name != "cpu" else "cpu"
    return Ranks(device=device, replicas=actor.ulysses_sequence_parallel_size)


class ActorHook:
    """What verl's actor calls, in the order of the methods.

    Args:
        actor: verl's ``DataParallelPPOActor``.
    """

    def __init__(self, actor: Any):
        self.actor = actor
        self.localizer: Localizer | None = None
        self.stabilizer: Stabilizer | None = None
        self.weigher: TokenWeigher | None = None
        self.is_stage = False
        """Whether this update is one of Lopti's two stages."""
        self._step: ActorStep | None = None
        self._micro_batch = 0
        self._num_without_policy = 0

    def begin_update(self, data: Any) -> list[str]:
        """Take what the driver sent with verl's DataProto; returns the batch keys that the actor must carry along."""
        self.is_stage = STAGE_MASK_KEY in data.batch.keys()
        if self.stabilizer is not None:
            stage, learned = data.meta_info.get(STAGE_NAME_KEY, ""), data.meta_info.get(STABILIZER_KEY)
            self.stabilizer.begin_update(GradientSpace(self.actor.actor_module), stage, learned)
        if self.localizer is not None:
            policy = data.meta_info.get(POLICY_KEY)
            if policy is None:
                self._note_missing_policy()
            self.localizer.begin_update(policy, GradientSpace(self.actor.actor_module, self.localizer.ranks))
        return [key for key in (STAGE_MASK_KEY, ROW_KEY) if key in data.batch.keys()]

    def _note_missing_policy(self) -> None:
        """Say once that nothing is looked into, and count: a trainer with its own ``fit`` may not call our hook."""
        self._num_without_policy += 1
        if self._num_without_policy == 1 and self.localizer.ranks.is_first:
            logger.error(
                "gradloc: spike_detection is on, but this trainer updates the actor without sending a policy, so no "
                "spike will be looked into. Where its fit() calls actor_rollout_wg.update_actor(batch), call "
                "self.gradloc.update(self, batch) instead, and self.gradloc.stamp(batch) once the uids are set, as "
                "RayPPOTrainer.fit does."
            )

    def begin_mini_batch(self, micro_batches: list, temperature: float, on_policy: bool) -> None:
        """Before the first micro-batch of an optimizer step."""
        self._micro_batch = -1
        if self.localizer is not None:
            dp_size = self.localizer.ranks.size
            self._step = ActorStep(self.actor, micro_batches, temperature, on_policy, dp_size)
            self.localizer.begin_mini_batch(self._step)

    def before_forward(self) -> None:
        """Before a micro-batch's forward."""
        self._micro_batch += 1
        if self._step is not None:
            self._step.before_forward(self._micro_batch)

    def after_forward(self, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        """After it: (B, T) both."""
        if self._step is not None:
            self._step.after_forward(self._micro_batch, log_prob, entropy)

    def token_weights(self, model_inputs, log_prob, given, metrics) -> torch.Tensor | None:
        """The factors on the token losses: :meth:`~..stabilize.ratio_clip.TokenWeigher.token_weights`."""
        if self.weigher is None:
            return given
        return self.weigher.token_weights(model_inputs, log_prob, given, metrics)

    def in_stage(self, values: torch.Tensor, model_inputs: dict[str, Any]) -> torch.Tensor:
        """Values (B, T), zero outside of Lopti's stage: no part in a term of the loss; denominators stay."""
        return values * model_inputs[STAGE_MASK_KEY] if STAGE_MASK_KEY in model_inputs else values

    def after_backward(self) -> None:
        """After a micro-batch's backward."""
        if self.localizer is not None:
            self.localizer.after_backward()

    def clip(self) -> torch.Tensor:
        """Clip the gradient in ``.grad``; returns its norm before, a scalar.

        With ``layer_clip`` nothing is clipped before localization has looked, and the norm is measured here instead.
        """
        if self.stabilizer is not None and self.stabilizer.clips_layers:
            return self.stabilizer.measure()
        return self.actor._clip_grad_norm()

    def before_step(self) -> torch.Tensor:
        """Clip, look, and settle what the step takes; returns the norm before clipping, a scalar."""
        grad_norm = self.clip()
        if self.localizer is not None:
            grad_norm = self.localizer.before_step(grad_norm)
            self._step = None
        if self.stabilizer is not None:
            grad_norm = self.stabilizer.before_step(grad_norm)
        return grad_norm

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add the metrics that every rank has alike."""
        if self.localizer is not None:
            self.localizer.end_update()
            if self._num_without_policy:
                metrics["gradloc/updates_without_policy"] = [self._num_without_policy]
        if self.stabilizer is not None:
            self.stabilizer.end_update(metrics)

    def report(self) -> RankReport:
        """What this process has to say of the last update."""
        learned = None if self.stabilizer is None else self.stabilizer.state()
        if self.localizer is None:
            return RankReport(Ranks().process, learned=learned)
        return self.localizer.report(learned)


class _Powers:
    """The actor's powers: see :class:`~..loop.localizer.ActorPowers`."""

    def __init__(self, hook: ActorHook):
        self._hook = hook
        self._actor = hook.actor

    takes_what_is_not_finite = False

    @property
    def clip_limit(self) -> float:
        stabilizer = self._hook.stabilizer
        measures_only = stabilizer is not None and stabilizer.clips_layers
        return math.inf if measures_only else self._actor.config.grad_clip

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._actor.actor_optimizer

    @property
    def scales_loss(self) -> bool:
        return self._actor.scaler is not None

    def clip(self) -> torch.Tensor:
        return self._hook.clip()

    def save_weights(self, global_step: int) -> str | None:
        ranks = self._hook.localizer.ranks
        return save_event_weights(self._actor.actor_module, self._actor.config.gradloc, global_step, ranks)
