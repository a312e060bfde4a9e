# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's actor as a step that can be replayed: all forwards and backwards are verl's own."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from verl.utils.device import get_device_id

from ...core.step import Details, Numerics, Outputs, OwnLoss, Recorded, RngState, record
from ...keys import ROW_KEY
from ..verl_common.losses import weights_of
from ..verl_common.precise import logit_bytes, readout_of
from .loss import forwarded, own_loss


class ActorStep(OwnLoss):
    """One mini-batch of verl's actor, replayable: the :class:`~...core.step.TrainingStep` of the search."""

    def __init__(self, actor: Any, micro_batches: list, temperature: float, on_policy: bool, dp_size: int):
        self.actor = actor
        self.micro_batches = micro_batches
        self.temperature = temperature
        self.on_policy = on_policy
        self.dp_size = dp_size
        self.num_micro_batches = len(micro_batches)
        self._recorded: list[Recorded | None] = [None] * len(micro_batches)

    def before_forward(self, micro_batch: int) -> None:
        self._recorded[micro_batch] = Recorded(rng=RngState(torch.device(self.actor.device_name)))

    def after_forward(self, micro_batch: int, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        record(self._recorded[micro_batch], Outputs(log_prob, entropy))

    def recorded(self, micro_batch: int) -> Recorded:
        return self._recorded[micro_batch]

    def in_pass(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # verl's actor reduces the gradient after every micro-batch

    def rows(self, micro_batch: int) -> list[int]:
        """Where the micro-batch's rows stand in the driver's batch; empty when the driver did not say."""
        batch = self.micro_batches[micro_batch].batch
        return batch[ROW_KEY].tolist() if ROW_KEY in batch.keys() else []

    def token_mask(self, micro_batch: int) -> torch.Tensor:
        return self.micro_batches[micro_batch].batch["response_mask"].bool().to(get_device_id())

    @property
    def numerics(self) -> Numerics:
        scale = 1.0 if self.actor.scaler is None else self.actor.scaler.get_scale()
        return Numerics(self.actor.param_dtype, scale, 1.0 / (self.dp_size * scale), self.temperature)

    def details(self, micro_batch: int) -> Details:
        from verl.trainer.ppo.core_algos import agg_loss

        config, mask = self.actor.config, self.micro_batches[micro_batch].batch["response_mask"].to(get_device_id())
        mode, sizes = config.loss_agg_mode, config.global_batch_info
        weights = weights_of(mask, lambda token_losses: agg_loss(token_losses, mask, mode, **sizes))
        weights = weights * loss_scale_factor(config, len(mask)) / self.dp_size
        return Details(self._old_log_prob(micro_batch), weights, self.on_policy)

    def forward(self, micro_batch: int, needs_entropy: bool = False) -> Outputs:
        actor, config = self.actor, self.actor.config
        has_entropy = needs_entropy or config.calculate_entropy or config.entropy_coeff != 0
        is_training = torch.is_grad_enabled()
        readout = readout_of(actor.actor_module, actor.param_dtype, actor.use_fused_kernels)
        with nullcontext() if is_training else readout:
            found = actor._forward_micro_batch(
                self._inputs(micro_batch), temperature=self.temperature, calculate_entropy=has_entropy
            )
        log_prob, entropy = forwarded(found)
        return Outputs(log_prob, entropy if has_entropy else None)

    def forward_bytes(self) -> int:
        actor = self.actor
        if actor.use_fused_kernels:
            return 0
        masks = [micro_batch.batch["attention_mask"] for micro_batch in self.micro_batches]
        num_positions = max(int(mask.sum()) if actor.use_remove_padding else mask.numel() for mask in masks)
        vocabulary = getattr(actor.actor_module.config.get_text_config(), "vocab_size", 0)
        config = actor.config
        is_chunked = config.entropy_from_logits_with_chunking and actor.use_remove_padding
        is_whole = (config.calculate_entropy or config.entropy_coeff != 0) and not is_chunked
        each = logit_bytes(has_entropy=is_whole)
        return int(num_positions * vocabulary * each) // actor.ulysses_sequence_parallel_size

    @property
    def without_kl(self) -> dict[str, Any] | None:
        return {"use_kl_loss": False} if self.actor.config.use_kl_loss else None

    def coefficients_under(
        self, micro_batch: int, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Outputs:
        recorded = self._recorded[micro_batch]
        values = [
            None if value is None else value.detach().float().clone() for value in (recorded.log_prob, recorded.entropy)
        ]
        leaves = [value.requires_grad_() for value in values if value is not None]
        inputs = {**self._inputs(micro_batch), "old_log_probs": self._old_log_prob(micro_batch), **(tensors or {})}
        with torch.enable_grad():
            loss = own_loss(self.actor, inputs, values[0], values[1], settings)
        return Outputs(*torch.autograd.grad(loss, leaves, allow_unused=True))

    # ---- inside

    def _old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """The old log-probs (B, T) that the loss used: the current ones under verl's on-policy shortcut."""
        recorded = self._recorded[micro_batch].log_prob
        if self.on_policy and not self.actor.config.get("use_rollout_log_probs", False):
            return recorded
        return self.micro_batches[micro_batch].batch["old_log_probs"].to(recorded.device)

    def _inputs(self, micro_batch: int) -> dict[str, Any]:
        data = self.micro_batches[micro_batch].to(get_device_id())
        return {**data.batch, **data.non_tensor_batch}


def loss_scale_factor(config: Any, num_rows: int) -> float:
    """The factor that verl's gradient accumulation puts on the loss of a micro-batch of this many rows."""
    if config.use_dynamic_bsz:
        return num_rows / config.ppo_mini_batch_size
    return 1 / (config.ppo_mini_batch_size // config.ppo_micro_batch_size_per_gpu)
