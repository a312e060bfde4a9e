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
"""What verl's trainer calls: the rollout filter, and the gradient analysis between critic and actor update.

Whatever fails in here on the trainer's side is logged and counted, and training goes on; after repeated failures the
analysis switches itself off.
"""

import logging
import os
import time
from typing import Any, Optional

import numpy as np
import torch

from .buckets import split_groups
from .coefficients import BUCKET_KEY
from .config import AnalysisSettings, FilterSettings, check_geometry, geometry, read_settings
from .groups import Groups
from .metrics import SCHEMA_VERSION, analysis_metrics, bucket_cosines, bucket_records, group_table
from .probe import NUM_BUCKETS_KEY, RECORD_KEY
from .rollout import prepare_batch
from .rollout_filter import FILTER_KEY, RolloutFilter, groups_of
from .store import write_analysis
from .table import log_group_table

__all__ = ["Analysis", "build_analysis"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_MAX_FAILURES = 3
_SEEDS_APART = 1_000_003
"""Between the draws of two steps: a prime above any seed that people type."""
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
    """The trainer's analysis and rollout filter, or None while both are off.

    Args:
        trainer: verl's ``RayPPOTrainer``, its data loaded.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    settings, chosen = read_settings(trainer.config)
    if settings is None and chosen.keeps_all:
        return None
    if settings is not None:
        check_geometry(settings, trainer.config, len(trainer.train_dataset))
    return Analysis(settings, chosen, trainer.config)


class Analysis:
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    Args:
        settings: None: filter only.
        chosen: the filter's settings.
        config: the trainer's whole config.
    """

    def __init__(self, settings: Optional[AnalysisSettings], chosen: FilterSettings, config: Any):
        self.settings = settings
        self.filter = RolloutFilter(chosen)
        actor = config.actor_rollout_ref.actor
        self.root = os.path.abspath(os.path.expanduser(actor.bisect_dump_dir))
        self.seed = config.data.get("seed") or 0
        self.num_failures = 0

    def run(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Scale the filtered batch's advantages, and analyse where the step is due.

        Args:
            trainer: verl's trainer, just before the actor's update.
            batch: the training batch, with advantages; not changed by the analysis.
            metrics: of the step; added to.
            timing_raw: of the step; ``gradient_analysis`` is added, in seconds.

        Returns:
            Whether the run is to end here.
        """
        self.filter.scale_advantages(batch)
        settings = self.settings
        if settings is None or not settings.is_due(trainer.global_steps) or self.num_failures >= _MAX_FAILURES:
            return False
        start = time.perf_counter()
        try:
            metrics.update(self._analyse(trainer, batch))
        except Exception as error:
            if settings.exit_after or _is_of_workers(error):
                raise  # no training to protect; or ranks that wait for each other, which no one can rescue
            self.num_failures += 1
            logger.exception(
                "gradloc: the gradient analysis at step %s failed (failure %d of %d before it switches itself off): "
                "training goes on",
                trainer.global_steps,
                self.num_failures,
                _MAX_FAILURES,
            )
        metrics["grad_analysis/failures"] = self.num_failures
        timing_raw["gradient_analysis"] = time.perf_counter() - start
        if settings.exit_after:
            metrics["training/global_step"] = trainer.global_steps
            metrics["trainer/exited_after_gradient_analysis"] = 1.0
            metrics["timing_s/gradient_analysis"] = timing_raw["gradient_analysis"]
        return settings.exit_after

    # ---- inside

    def _analyse(self, trainer: Any, batch: Any) -> dict[str, float]:
        """Run one analysis, write it, and return its metrics."""
        settings, start = self.settings, time.perf_counter()
        if settings.is_separate:
            seed = self.seed + _SEEDS_APART * trainer.global_steps
            batch = prepare_batch(trainer, *geometry(settings, trainer.config), seed)
            self.filter.scale_advantages(batch)
        if "multi_modal_inputs" in batch.non_tensor_batch:
            raise ValueError("the gradient analysis does not take batches with multi_modal_inputs")
        groups = groups_of(batch, batch.batch["token_level_scores"])
        buckets = split_groups(groups.reward_std, settings.bucket_mode, settings.num_buckets)
        if settings.bucket_mode == "quantile" and len(groups) > 1 and len(np.unique(groups.reward_std)) == 1:
            logger.warning("every group has the same reward deviation, so the quantile buckets say nothing")
        raw = self._ask_workers(trainer, batch, groups, buckets)
        record = self._record(trainer, batch, groups, buckets, raw)
        record["cost"]["seconds"] = time.perf_counter() - start
        record["metrics"] = analysis_metrics(record)
        write_analysis(self.root, record)
        log_group_table(trainer.config.trainer.logger, record)
        return record["metrics"]

    def _ask_workers(self, trainer: Any, batch: Any, groups: Groups, buckets: dict[str, list[int]]) -> dict[str, Any]:
        from verl.protocol import pad_dataproto_to_divisor

        number_of = {group: number for number, members in enumerate(buckets.values()) for group in members}
        data = batch.select([key for key in _ACTOR_KEYS if key in batch.batch.keys()], [], [])
        data.batch[BUCKET_KEY] = torch.tensor([number_of[group] for group in groups.of_row.tolist()])
        data, num_filling = pad_dataproto_to_divisor(data, trainer._get_dp_size(trainer.actor_rollout_wg, "actor"))
        if num_filling:
            data.batch[BUCKET_KEY][-num_filling:] = -1
        data.meta_info = {
            "temperature": trainer.config.actor_rollout_ref.rollout.temperature,
            NUM_BUCKETS_KEY: len(buckets),
        }
        raw = trainer.actor_rollout_wg.analyze_gradients(data).meta_info["metrics"][RECORD_KEY][0]
        if "error" in raw:
            raise RuntimeError(raw["error"])
        return raw

    def _record(self, trainer: Any, batch: Any, groups: Groups, buckets, raw: dict[str, Any]) -> dict[str, Any]:
        """Everything about one analysis, as it is written to disk."""
        config, settings = trainer.config, self.settings
        actor = config.actor_rollout_ref.actor
        tokens = batch.batch["response_mask"].sum(-1).numpy()
        return {
            "schema_version": SCHEMA_VERSION,
            "run": {"project": config.trainer.project_name, "experiment": config.trainer.experiment_name},
            "global_step": trainer.global_steps,
            "bucket_mode": settings.bucket_mode,
            "num_buckets": settings.num_buckets,
            "loss": {
                "terms": raw["terms"],
                "loss_mode": actor.policy_loss.get("loss_mode", "vanilla"),
                "loss_agg_mode": actor.loss_agg_mode,
                "adv_estimator": str(config.algorithm.adv_estimator),
            },
            "batch": {
                "source": "separate" if settings.is_separate else "training",
                "num_groups": len(groups),
                "num_rows": len(tokens),
                "num_tokens": int(tokens.sum()),
                "zero_variance_share": groups.zero_variance_share,
                "filter": batch.meta_info.get(FILTER_KEY),
            },
            "buckets": bucket_records(raw, buckets, groups, tokens),
            "task_cosines": bucket_cosines(raw),
            "groups": group_table(buckets, groups),
            "cost": {
                "forwards": raw["forwards"],
                "backwards": raw["backwards"],
                "probe_seconds": raw["seconds"],
            },
        }


def _is_of_workers(error: Exception) -> bool:
    from ray.exceptions import RayError

    return isinstance(error, RayError)
