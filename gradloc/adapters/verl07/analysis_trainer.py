# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter in verl's trainer."""

from typing import Any, Optional

import torch

from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from ...analysis.analyses import Analyses
from ...analysis.config import BucketSettings, QuartileSettings, check_geometry, geometry
from ...analysis.reporter import Batch
from ...rollout_filter.config import FilterSettings
from ..verl_common.analyses import FILLER, analyses_in, refuse_pictures, run_of, well
from .analysis_actor import RECORD_KEY
from .analysis_batch import prepare_batch
from .refusals import check_run, settings_of
from .rollout_filter import FILTER_KEY, RolloutFilter

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


def build_analysis(trainer: Any) -> Optional["Analysis"]:
    """The trainer's analyses and rollout filter, or None while all are off.

    Args:
        trainer: verl's ``RayPPOTrainer``, its data loaded.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    config = trainer.config
    found = analyses_in(config)
    if found is None:
        return None
    buckets, quartiles, chosen = found
    if buckets is not None:
        check_run("trainer.gradient_analysis_mode", config)
        check_geometry(buckets, config, len(trainer.train_dataset))
    if quartiles is not None:
        check_run("trainer.quartile_analysis_mode", config)
    return Analysis(trainer, buckets, quartiles, chosen)


class Analysis(Analyses):
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    Args:
        trainer: verl's.
        buckets: None: no analysis by bucket.
        quartiles: None: no analysis by quartile.
        chosen: the filter's settings.
    """

    def __init__(
        self,
        trainer: Any,
        buckets: BucketSettings | None,
        quartiles: QuartileSettings | None,
        chosen: FilterSettings,
    ):
        config = trainer.config
        super().__init__(run_of(config, settings_of(config).root), buckets, quartiles, self._separate)
        self.filter = RolloutFilter(chosen)
        self._trainer = trainer

    def run(self, trainer: Any, batch: DataProto, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Scale the filtered batch's advantages, and analyse where the step is due.

        Args:
            trainer: verl's trainer, just before the actor's update.
            batch: the training batch, with advantages; not changed by the analyses.
            metrics: of the step; added to.
            timing_raw: of the step; added to.

        Returns:
            Whether the run is to end here.
        """
        self._trainer = trainer
        self.filter.scale_advantages(batch)
        return self.analyse(lambda feature: self._seen(batch, feature), trainer.global_steps, metrics, timing_raw)

    def _separate(self, seed: int) -> Batch:
        num_groups, group_size = geometry(self.buckets.settings, self._trainer.config)
        batch = prepare_batch(self._trainer, num_groups, group_size, seed)
        self.filter.scale_advantages(batch)
        return self._seen(batch, "trainer.gradient_analysis_mode")

    def _seen(self, batch: DataProto, feature: str) -> Batch:
        """verl's batch as an analysis sees it."""

        def ask(tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> list[dict[str, Any]]:
            refuse_pictures(feature, batch.non_tensor_batch.get("multi_modal_inputs", ()))
            return _ask_workers(self._trainer, batch, tensors, meta_info)

        return Batch(batch.batch, batch.non_tensor_batch["uid"], batch.meta_info.get(FILTER_KEY), ask)


def _ask_workers(
    trainer: Any, batch: DataProto, tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]
) -> list[dict[str, Any]]:
    """Deal the rows that the actor needs out to the ranks evenly, and have its workers analyse them."""
    data = batch.select([key for key in _ACTOR_KEYS if key in batch.batch.keys()], [], [])
    for key, values in tensors.items():
        data.batch[key] = values
    data, num_filling = pad_dataproto_to_divisor(data, trainer._get_dp_size(trainer.actor_rollout_wg, "actor"))
    if num_filling:
        for key in tensors:
            data.batch[key][-num_filling:] = FILLER
    data.meta_info = {"temperature": trainer.config.actor_rollout_ref.rollout.temperature, **meta_info}
    return well(trainer.actor_rollout_wg.analyze_gradients(data).meta_info["metrics"][RECORD_KEY])
