# SPDX-License-Identifier: Apache-2.0
"""One mini-batch of verl's actor as a step that can be replayed: all forwards and backwards are verl's own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from verl.utils.device import get_device_id

from ...core.step import LossOfGiven, Recorded, RngState, let_through, record
from ...keys import ROW_KEY
from ..verl_common.losses import weights_of
from ..verl_common.precise import logit_bytes, readout_of


class ActorStep(LossOfGiven):
    """One mini-batch of verl's actor, replayable: the :class:`~...core.step.TrainingStep` of the search."""

    reduces_once = False

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
        record(self._recorded[micro_batch], log_prob, entropy)

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

    def token_weights(self, micro_batch: int) -> torch.Tensor:
        from verl.trainer.ppo.core_algos import agg_loss

        config = self.actor.config
        mask = self.micro_batches[micro_batch].batch["response_mask"].to(get_device_id())
        mode, sizes = config.loss_agg_mode, config.global_batch_info
        weights = weights_of(mask, lambda token_losses: agg_loss(token_losses, mask, mode, **sizes))
        return weights * self.actor._loss_scale_factor(mask) / self.dp_size

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.actor.param_dtype

    def forward(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._recorded[micro_batch].rng.restore()
        with torch.no_grad(), readout_of(self.actor.actor_module, self.compute_dtype, self.actor.use_fused_kernels):
            entropy, log_prob = self.actor._forward_for_loss(self._inputs(micro_batch), self.temperature)
        return log_prob, entropy

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

    def entropies(self, micro_batch: int) -> torch.Tensor:
        self._recorded[micro_batch].rng.restore()
        with torch.no_grad():
            inputs = self._inputs(micro_batch)
            entropy, _ = self.actor._forward_for_loss(inputs, self.temperature, calculate_entropy=True)
        return entropy

    def loss(self, micro_batch: int, selected: torch.Tensor | None) -> torch.Tensor:
        self._recorded[micro_batch].rng.restore()
        inputs = self._inputs(micro_batch)
        entropy, log_prob = self.actor._forward_for_loss(inputs, self.temperature)
        if selected is not None:
            log_prob, entropy = let_through(selected, log_prob), let_through(selected, entropy)
        loss = self._loss(inputs, log_prob, entropy, {})
        scaler = self.actor.scaler
        return loss if scaler is None else scaler.scale(loss)

    @property
    def loss_scale(self) -> float:
        """What the fp16 scaler multiplies the loss, and so every probe's gradient, with."""
        return 1.0 if self.actor.scaler is None else self.actor.scaler.get_scale()

    def has_kl_term(self) -> bool:
        return self.actor.config.use_kl_loss

    def kl_coefficients(self, micro_batch: int) -> torch.Tensor | None:
        """d (KL term) / d log_prob (B, T) from the recorded log-probs: no forward. None without a KL loss."""
        if not self.has_kl_term():
            return None
        log_prob, terms = self.leaf(micro_batch), {}
        self._loss(self._inputs(micro_batch), log_prob, self._recorded[micro_batch].entropy, terms)
        return torch.autograd.grad(terms["kl"], log_prob)[0]

    def loss_of_given(self, micro_batch: int, log_prob: torch.Tensor, is_without_kl: bool = False) -> torch.Tensor:
        return self._loss(self._inputs(micro_batch), log_prob, self._recorded[micro_batch].entropy, {})

    def old_log_prob(self, micro_batch: int) -> torch.Tensor:
        """The old log-probs (B, T) that the loss used: the current ones under verl's on-policy shortcut."""
        recorded = self._recorded[micro_batch].log_prob
        if self.on_policy and not self.actor.config.get("use_rollout_log_probs", False):
            return recorded
        return self.micro_batches[micro_batch].batch["old_log_probs"].to(recorded.device)

    def _inputs(self, micro_batch: int) -> dict[str, Any]:
        data = self.micro_batches[micro_batch].to(get_device_id())
        return {**data.batch, **data.non_tensor_batch}

    def _loss(self, inputs, log_prob, entropy, terms: dict) -> torch.Tensor:
        scratch = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}
        return self.actor._micro_batch_loss(inputs, log_prob, entropy, self.on_policy, scratch, {}, terms)
