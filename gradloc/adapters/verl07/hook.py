# SPDX-License-Identifier: Apache-2.0
"""What verl's actor calls: one object, one method per moment of an update.

It calls the localizer and the stabilizers, where the config switches them on; with both off it changes nothing.
"""

import logging
from typing import Any

import torch

from ...config import GradLocConfig
from ...core.ranks import Ranks
from ...keys import POLICY_KEY, ROW_KEY
from ...reweighting.stages import STAGE_MASK_KEY
from ..verl_common.watch import Watch, device_of
from .step import ActorStep

logger = logging.getLogger(__name__)


def build_hook(actor: Any) -> "ActorHook":
    """The hook of verl's ``DataParallelPPOActor``, for which the driver has settled the settings."""
    return ActorHook(actor, actor.config.gradloc)


def ranks_of(actor: Any) -> Ranks:
    """The data-parallel ranks of verl's actor."""
    return Ranks(device=device_of(), replicas=actor.ulysses_sequence_parallel_size)


class ActorHook(Watch):
    """What verl's ``DataParallelPPOActor`` calls, in the order of the methods."""

    module = property(lambda self: self.actor.actor_module)
    optimizer = property(lambda self: self.actor.actor_optimizer)
    scaler = property(lambda self: self.actor.scaler)
    grad_clip = property(lambda self: self.actor.config.grad_clip)

    def __init__(self, actor: Any, settings: GradLocConfig):
        self.actor = actor
        super().__init__(settings, ranks_of(actor))
        self.is_stage = False
        """Whether this update is one of Lopti's two stages."""
        self._step: ActorStep | None = None
        self._micro_batch = 0
        self._num_without_policy = 0

    def begin_update(self, data: Any) -> list[str]:
        """Take the policy that came with verl's DataProto; returns the batch keys that the actor must carry along."""
        self.is_stage, policy = STAGE_MASK_KEY in data.batch.keys(), data.meta_info.get(POLICY_KEY)
        if self.localizer is not None and policy is None:
            self._note_missing_policy()
        self.begin(policy)
        return [key for key in (STAGE_MASK_KEY, ROW_KEY) if key in data.batch.keys()]

    def _note_missing_policy(self) -> None:
        """Say once that nothing is searched, and count: a trainer with a ``fit`` of its own may not call our hook."""
        self._num_without_policy += 1
        if self._num_without_policy == 1 and self.ranks.is_first:
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
            self._step = ActorStep(self.actor, micro_batches, temperature, on_policy, self.ranks.size)
            self.localizer.begin_mini_batch(self._step)

    def before_forward(self) -> None:
        """Before a micro-batch's forward."""
        self._micro_batch += 1
        if self._step is not None:
            self._step.before_forward(self._micro_batch)

    def after_forward(self, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        """After the forward: log-probs and entropies, (B, T) both."""
        if self._step is not None:
            self._step.after_forward(self._micro_batch, log_prob, entropy)

    def token_weights(self, model_inputs, log_prob, given, metrics) -> torch.Tensor | None:
        """The factors on the token losses: :meth:`~..stabilize.ratio_clip.TokenWeigher.token_weights`."""
        if self.weigher is None:
            return given
        return self.weigher.token_weights(model_inputs, log_prob, given, metrics)

    def in_stage(self, values: torch.Tensor, model_inputs: dict[str, Any]) -> torch.Tensor:
        """Values (B, T), zero outside of Lopti's stage, so that they add nothing to a loss; denominators stay."""
        return values * model_inputs[STAGE_MASK_KEY] if STAGE_MASK_KEY in model_inputs else values

    def clip_by_verl(self) -> torch.Tensor:
        return self.actor._clip_grad_norm()

    def before_step(self) -> torch.Tensor:
        norm = super().before_step()
        self._step = None
        return norm

    def end_update(self, metrics: dict[str, Any]) -> None:
        """Add the metrics that every rank has alike."""
        self.end(metrics)
        if self._num_without_policy:
            metrics["gradloc/updates_without_policy"] = [self._num_without_policy]
