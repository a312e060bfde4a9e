# SPDX-License-Identifier: Apache-2.0
"""verl's actor as the gradient analyses see it, and the analysis that its worker is asked for."""

from collections.abc import Iterator
from typing import Any

import torch

from verl import DataProto
from verl.utils.seqlen_balancing import prepare_dynamic_batch

from ...analysis.actor import BUCKET_KEY, MicroBatch, Rows
from ...analysis.measure import measure
from ..verl_common.analyses import VerlAnalysed
from ..verl_common.precise import readout_of
from .hook import ranks_of
from .loss import forwarded, own_loss
from .step import loss_scale_factor

RECORD_KEY = "gradloc_analysis"
"""Among a worker's metrics: what it measured."""
_INDEX_KEY = "gradloc_analysis_row"


def analyze(actor: Any, data: DataProto) -> dict[str, Any]:
    """Split the gradient of this rank's rows: :func:`~...analysis.measure.measure`. Their meta info has ``temperature``
    and what is asked for."""
    adapted = AnalysisActor(actor, data.meta_info["temperature"])
    return measure(adapted, ranks_of(actor), dict(data.batch), data.meta_info)


class AnalysisActor(VerlAnalysed):
    """What the analyses may ask of verl's ``DataParallelPPOActor``; ``temperature`` is the rollout's."""

    def __init__(self, actor: Any, temperature: float):
        super().__init__(actor.config, actor.scaler)
        self._actor, self._temperature = actor, temperature
        self.module, self.optimizer = actor.actor_module, actor.actor_optimizer
        self.device = ranks_of(actor).device
        self.grad_clip = actor.config.grad_clip

    def micro_batches(self, rows: Rows) -> Iterator[MicroBatch]:
        data = DataProto.from_dict({**rows, _INDEX_KEY: torch.arange(len(rows[BUCKET_KEY]))})
        mini_batches = data.split(self._config.ppo_mini_batch_size)
        on_policy = len(mini_batches) == 1 and self._config.ppo_epochs == 1
        for micro_batch in (part for mini_batch in mini_batches for part in self._cut(mini_batch)):
            is_real = micro_batch.batch[BUCKET_KEY] >= 0
            if is_real.any():
                micro_batch = micro_batch.select_idxs(is_real)
            inputs = {**micro_batch.to(self.device).batch}
            index = inputs[_INDEX_KEY].cpu() if is_real.any() else torch.empty(0, dtype=torch.long)
            yield MicroBatch(inputs, index, on_policy)

    def _cut(self, mini_batch: DataProto) -> list[DataProto]:
        """Cut as verl's ``update_policy`` does."""
        if self._config.use_dynamic_bsz:
            return prepare_dynamic_batch(mini_batch, max_token_len=self._config.ppo_max_token_len_per_gpu)[0]
        return mini_batch.split(self._config.ppo_micro_batch_size_per_gpu)

    def forward(self, inputs: Rows, with_entropy: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if with_entropy is None:
            with_entropy = self._config.calculate_entropy or self._config.entropy_coeff != 0
        found = self._actor._forward_micro_batch(inputs, temperature=self._temperature, calculate_entropy=with_entropy)
        log_prob, entropy = forwarded(found)
        return log_prob, entropy if with_entropy else None

    def log_prob(self, inputs: Rows) -> torch.Tensor:
        with torch.no_grad(), readout_of(self.module, self._actor.param_dtype, self._actor.use_fused_kernels):
            return self.forward(inputs, with_entropy=False)[0]

    def loss_terms(
        self, inputs: Rows, log_prob: torch.Tensor, entropy: torch.Tensor | None, on_policy: bool
    ) -> dict[str, torch.Tensor]:
        inputs = {**inputs, **({"old_log_probs": log_prob.detach()} if on_policy else {})}
        nothing_won = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        scale = loss_scale_factor(self._config, len(log_prob))

        def term(inputs: Rows, **off: Any) -> torch.Tensor:
            return own_loss(self._actor, inputs, log_prob, entropy, off) / scale

        terms = {"task": term(inputs, use_kl_loss=False, entropy_coeff=0)}
        if "kl" in self.terms:
            terms["kl"] = term(nothing_won, entropy_coeff=0)
        if "entropy" in self.terms:
            terms["entropy"] = term(nothing_won, use_kl_loss=False)
        return terms

    def share(self, part: MicroBatch, term: str, num_rows: int) -> float:
        return len(part.rows) / num_rows  # verl averages over a micro-batch, and then over these

    def clip(self) -> torch.Tensor:
        return self._actor._clip_grad_norm()
