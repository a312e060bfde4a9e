# SPDX-License-Identifier: Apache-2.0
"""verl's actor as the gradient analyses see it, and the analysis that its worker is asked for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from verl import DataProto
from verl.utils.seqlen_balancing import prepare_dynamic_batch

from ...analysis.actor import BUCKET_KEY, MicroBatch, Rows
from ...analysis.measure import measure
from ...touched import replaced
from ..verl_common.analyses import VerlAnalysed
from ..verl_common.precise import readout_of
from .hook import ranks_of

RECORD_KEY = "gradloc_analysis"
"""Among a worker's metrics: what it measured."""
_INDEX_KEY = "gradloc_analysis_row"


def analyze(actor: Any, data: DataProto) -> dict[str, Any]:
    """Split the gradient of this rank's rows: :func:`~...analysis.measure.measure`. Their meta info has ``temperature``
    and what is asked for."""
    adapted = AnalysisActor(actor, data.meta_info["temperature"])
    with adapted.whole_batch():
        return measure(adapted, ranks_of(actor), dict(data.batch), data.meta_info)


class AnalysisActor(VerlAnalysed):
    """What the analyses may ask of verl's ``DataParallelPPOActor``; ``temperature`` is the rollout's."""

    def __init__(self, actor: Any, temperature: float):
        super().__init__(actor.config, actor.scaler)
        self._actor, self._temperature = actor, temperature
        self.module, self.optimizer = actor.actor_module, actor.actor_optimizer
        self.device = ranks_of(actor).device
        self.grad_clip = actor.config.grad_clip

    def whole_batch(self) -> AbstractContextManager[None]:
        """While verl's loss is not to be scaled for accumulation."""
        return replaced(self._actor, gradient_accumulation=1)

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
        entropy, log_prob = self._actor._forward_for_loss(inputs, self._temperature, with_entropy)
        return log_prob, entropy

    def log_prob(self, inputs: Rows) -> torch.Tensor:
        with torch.no_grad(), readout_of(self.module, self._actor.param_dtype, self._actor.use_fused_kernels):
            return self.forward(inputs, with_entropy=False)[0]

    def loss_terms(
        self, inputs: Rows, log_prob: torch.Tensor, entropy: torch.Tensor | None, on_policy: bool
    ) -> dict[str, torch.Tensor]:
        scratch, terms = {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0}, {}
        total = self._actor._micro_batch_loss(inputs, log_prob, entropy, on_policy, scratch, {}, terms)
        terms["task"] = total - sum(terms.values())
        scale = self._actor._loss_scale_factor(inputs["response_mask"])
        return {name: value / scale for name, value in terms.items()}

    def share(self, part: MicroBatch, term: str, num_rows: int) -> float:
        return len(part.rows) / num_rows  # verl averages over a micro-batch, and then over these

    def clip(self) -> torch.Tensor:
        return self._actor._clip_grad_norm()
