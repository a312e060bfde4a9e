# SPDX-License-Identifier: Apache-2.0
"""The gradient analyses and the rollout filter in verl's trainer."""

from typing import Any, Optional

import torch

from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from ...analysis.buckets.reporter import BucketAnalysis
from ...analysis.config import BucketSettings, QuartileSettings, check_geometry, geometry, read_buckets, read_quartiles
from ...analysis.quartiles.reporter import QuartileAnalysis
from ...analysis.reporter import Batch, Run
from ...rollout_filter.config import FilterSettings, read_filter
from .analysis_actor import RECORD_KEY
from .analysis_batch import prepare_batch
from .refusals import check_batch, check_run, settings_of
from .rollout_filter import FILTER_KEY, RolloutFilter

__all__ = ["FILLER", "Analysis", "build_analysis"]

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


def build_analysis(trainer: Any) -> Optional["Analysis"]:
    """The trainer's analyses and rollout filter, or None while all are off.

    Args:
        trainer: verl's ``RayPPOTrainer``, its data loaded.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    config = trainer.config
    buckets, quartiles, chosen = read_buckets(config), read_quartiles(config), read_filter(config)
    if buckets is None and quartiles is None and chosen.keeps_all:
        return None
    if buckets is not None:
        check_run("trainer.gradient_analysis_mode", config)
        check_geometry(buckets, config, len(trainer.train_dataset))
    if quartiles is not None:
        check_run("trainer.quartile_analysis_mode", config)
    return Analysis(trainer, buckets, quartiles, chosen)


class Analysis:
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
        run = _run(trainer.config)
        self.trackers = run.trackers
        self.filter = RolloutFilter(chosen)
        self.quartiles = None if quartiles is None else QuartileAnalysis(quartiles, run)
        self.buckets = None
        if buckets is not None:
            num_groups, group_size = geometry(buckets, trainer.config)
            self.buckets = BucketAnalysis(buckets, run, lambda seed: self._separate(num_groups, group_size, seed))
        self._trainer = trainer

    def run(self, trainer: Any, batch: DataProto, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Scale the filtered batch's advantages, and analyse where the step is due.

        Args:
            trainer: verl's trainer, just before the actor's update.
            batch: the training batch, with advantages; not changed by the analyses.
            metrics: of the step; added to.
            timing_raw: of the step; ``gradient_analysis`` and ``quartile_analysis`` are added, in seconds.

        Returns:
            Whether the run is to end here.
        """
        self._trainer, step = trainer, trainer.global_steps
        self.filter.scale_advantages(batch)
        if self.quartiles is not None:
            self.quartiles.run(self._seen(batch, "trainer.quartile_analysis_mode"), step, metrics, timing_raw)
        if self.buckets is None:
            return False
        was_due = self.buckets.run(self._seen(batch, "trainer.gradient_analysis_mode"), step, metrics, timing_raw)
        if not was_due or not self.buckets.settings.exit_after:
            return False
        metrics["training/global_step"] = step
        metrics["trainer/exited_after_gradient_analysis"] = 1.0
        metrics["timing_s/gradient_analysis"] = timing_raw["gradient_analysis"]
        return True

    def _separate(self, num_groups: int, group_size: int, seed: int) -> Batch:
        batch = prepare_batch(self._trainer, num_groups, group_size, seed)
        self.filter.scale_advantages(batch)
        return self._seen(batch, "trainer.gradient_analysis_mode")

    def _seen(self, batch: DataProto, feature: str) -> Batch:
        """verl's batch as an analysis sees it."""

        def ask(tensors: dict[str, torch.Tensor], meta_info: dict[str, Any]) -> list[dict[str, Any]]:
            check_batch(feature, batch)
            return _ask_workers(self._trainer, batch, tensors, meta_info)

        return Batch(batch.batch, batch.non_tensor_batch["uid"], batch.meta_info.get(FILTER_KEY), ask)


def _run(config: Any) -> Run:
    from ray.exceptions import RayError

    actor = config.actor_rollout_ref.actor
    return Run(
        root=settings_of(config).root,
        seed=config.data.get("seed") or 0,
        trackers={},
        names={"project": config.trainer.project_name, "experiment": config.trainer.experiment_name},
        loss={
            "loss_mode": actor.policy_loss.get("loss_mode", "vanilla"),
            "loss_agg_mode": actor.loss_agg_mode,
            "adv_estimator": str(config.algorithm.adv_estimator),
        },
        vital=(RayError,),
    )


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
    records = trainer.actor_rollout_wg.analyze_gradients(data).meta_info["metrics"][RECORD_KEY]
    for record in records:
        if "error" in record:
            raise RuntimeError(record["error"])
    return records
