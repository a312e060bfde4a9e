# SPDX-License-Identifier: Apache-2.0
"""The critic's engine with a localizer riding along: its values stand where the actor's log-probs stand."""

from typing import Any

import torch

from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from ..verl_common.losses import weights_of
from .engine import WatchedFSDP
from .step import EngineStep


class CriticStep(EngineStep):
    """One mini-batch of verl's critic, replayable: see :class:`~..core.step.TrainingStep`."""

    output, old = "values", "values"

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        mask, data, config = self.token_mask(micro_batch), self.micro_batches[micro_batch], self._config
        told = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
        told["loss_scale_factor"] = config.loss_scale_factor
        weights = weights_of(mask, lambda losses: 0.5 * agg_loss(losses, mask, config.loss_agg_mode, **told))
        return weights / self.dp_size

    def forward_bytes(self) -> int:
        return 0

    def has_kl_term(self) -> bool:
        return False


class GradLocValueEngine(WatchedFSDP, FSDPEngineWithValueHead):
    """verl's engine of the critic."""

    step_class = CriticStep


def watch_critic(worker: Any) -> DataProto:
    """Runs in each of the critic's workers (``TrainingWorker``), once it is built: its engine is ours from here on."""
    worker.engine.__class__ = GradLocValueEngine
    return DataProto()
