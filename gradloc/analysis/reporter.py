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
"""What verl's trainer calls: the rollout filter, and the gradient analyses between critic and actor update.

Whatever fails in here on the trainer's side is logged and counted, and training goes on; after repeated failures the
analysis switches itself off.
"""

import logging
import os
import time
from typing import Any, Optional

import numpy as np
import torch

from ..rollout_filter.filter import FILTER_KEY, RolloutFilter, groups_of
from ..verl_actor.analysis_batch import prepare_batch
from ..verl_actor.dispatch import ask_workers
from ..verl_actor.refusals import check_run
from .attempts import Attempts
from .buckets.metrics import SCHEMA_VERSION, analysis_metrics, bucket_cosines, bucket_records, group_table
from .buckets.probe import NUM_BUCKETS_KEY
from .buckets.split import split_groups
from .buckets.table import log_group_table
from .coefficients import BUCKET_KEY
from .config import AnalysisSettings, FilterSettings, check_geometry, geometry, read_quartiles, read_settings
from .groups import Groups
from .quartiles.reporter import QuartileAnalysis
from .store import write_analysis

__all__ = ["Analysis", "build_analysis"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_SEEDS_APART = 1_000_003
"""Between the draws of two steps: a prime above any seed that people type."""


def build_analysis(trainer: Any) -> Optional["Analysis"]:
    """The trainer's analyses and rollout filter, or None while all are off.

    Args:
        trainer: verl's ``RayPPOTrainer``, its data loaded.

    Raises:
        ValueError: one sentence that names a key with a bad value, also while the features are off.
    """
    settings, chosen = read_settings(trainer.config)
    by_quartile = read_quartiles(trainer.config)
    if settings is None and by_quartile is None and chosen.keeps_all:
        return None
    if settings is not None:
        check_run("trainer.gradient_analysis_mode", trainer.config)
        check_geometry(settings, trainer.config, len(trainer.train_dataset))
    if by_quartile is not None:
        check_run("trainer.quartile_analysis_mode", trainer.config)
    quartiles = None if by_quartile is None else QuartileAnalysis(by_quartile, trainer.config)
    return Analysis(settings, chosen, trainer.config, quartiles)


class Analysis:
    """Filters the rollouts and, at the steps that are due, splits the gradient that they are about to cause.

    Args:
        settings: None: no analysis by bucket.
        chosen: the filter's settings.
        config: the trainer's whole config.
        quartiles: None: no analysis by quartile.
    """

    def __init__(
        self,
        settings: AnalysisSettings | None,
        chosen: FilterSettings,
        config: Any,
        quartiles: QuartileAnalysis | None = None,
    ):
        self.settings = settings
        self.quartiles = quartiles
        self.filter = RolloutFilter(chosen)
        actor = config.actor_rollout_ref.actor
        self.root = os.path.abspath(os.path.expanduser(actor.bisect_dump_dir))
        self.seed = config.data.get("seed") or 0
        self.attempts = Attempts("gradient analysis")

    def run(self, trainer: Any, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Scale the filtered batch's advantages, and analyse where the step is due.

        Args:
            trainer: verl's trainer, just before the actor's update.
            batch: the training batch, with advantages; not changed by the analysis.
            metrics: of the step; added to.
            timing_raw: of the step; ``gradient_analysis`` and ``quartile_analysis`` are added, in seconds.

        Returns:
            Whether the run is to end here.
        """
        self.filter.scale_advantages(batch)
        if self.quartiles is not None:
            self.quartiles.run(trainer, batch, metrics, timing_raw)
        settings, step = self.settings, trainer.global_steps
        if settings is None or not settings.is_due(step) or self.attempts.is_over:
            return False
        start = time.perf_counter()
        # with exit_after there is no training to protect
        metrics.update(self.attempts.run(lambda: self._analyse(trainer, batch), step, settings.exit_after) or {})
        metrics["grad_analysis/failures"] = self.attempts.num_failures
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
        number_of = {group: number for number, members in enumerate(buckets.values()) for group in members}
        of_row = torch.tensor([number_of[group] for group in groups.of_row.tolist()])
        return ask_workers(trainer, batch, {BUCKET_KEY: of_row}, {NUM_BUCKETS_KEY: len(buckets)})[0]

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
