# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How the trainer asks the workers: the rows they need, dealt out evenly, and every rank's answer."""

from typing import Any

import torch

from ..analysis.buckets.probe import RECORD_KEY
from .refusals import check_batch

__all__ = ["FILLER", "ask_workers"]

FILLER = -1
"""What a tensor of ours holds in rows that only fill up the ranks."""
_ACTOR_KEYS = (
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_is_weights",
    "rollout_log_probs",
)
"""What the actor's loss may read."""


def ask_workers(
    trainer: Any, batch: Any, tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]
) -> list[dict[str, Any]]:
    """Have the actor's workers analyse a batch, which is not changed.

    Args:
        trainer: verl's trainer.
        batch: with advantages.
        tensors: what the analysis needs besides, a row for each of the batch's rows.
        meta_info: sent along, with the temperature.

    Returns:
        What each data-parallel rank found, in the order of the rows; the last rank's rows may end in filling ones.

    Raises:
        ValueError: one sentence, when the batch is one that cannot be analysed.
        RuntimeError: when a rank failed where all could be told.
    """
    from verl.protocol import pad_dataproto_to_divisor

    check_batch("trainer.gradient_analysis_mode", batch)
    data = batch.select([key for key in _ACTOR_KEYS if key in batch.batch.keys()], [], [])
    for key, values in tensors.items():
        data.batch[key] = values
    data, num_filling = pad_dataproto_to_divisor(data, trainer._get_dp_size(trainer.actor_rollout_wg, "actor"))
    if num_filling:
        for key in tensors:
            data.batch[key][-num_filling:] = FILLER
    data.meta_info = {"temperature": trainer.config.actor_rollout_ref.rollout.temperature, **meta_info}
    records = trainer.actor_rollout_wg.analyze_gradients(data).meta_info["metrics"][RECORD_KEY]
    for record in records:
        if "error" in record:
            raise RuntimeError(record["error"])
    return records
