# SPDX-License-Identifier: Apache-2.0
"""The analysis by bucket on the trainer's side: split the groups, ask the workers, write the record."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from ...record import analysis
from ...record.analysis import Filter, GradientAnalysis
from ...rollout_filter.groups import groups_of
from ..actor import BUCKET_KEY, NUM_BUCKETS_KEY
from ..config import BucketSettings
from ..files import log_group_table
from ..reporter import AnalysisBatch, AnalysisRun, Reporter
from .metrics import analysis_metrics, bucket_cosines, bucket_records, group_table
from .split import split_groups

logger = logging.getLogger(__name__)

_SEEDS_APART = 1_000_003  # between the draws of two steps: a prime above any seed that people type


class BucketAnalysis(Reporter):
    """Splits the gradient by term of the loss and by bucket of reward deviation; ``prepare`` as in ``Analyses``."""

    name, prefix = "gradient_analysis", "grad_analysis"
    settings: BucketSettings

    def __init__(self, settings: BucketSettings, run: AnalysisRun, prepare: Callable[[int], AnalysisBatch]):
        super().__init__(settings, run)
        self._prepare = prepare

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
        settings, start = self.settings, time.perf_counter()
        if settings.is_separate:
            batch = self._prepare(self.about.seed + _SEEDS_APART * global_step)
        mask = batch.tensors["response_mask"]
        groups = groups_of(batch.uids, batch.tensors["token_level_scores"], mask)
        buckets = split_groups(groups.reward_std, settings.bucket_mode, settings.num_buckets)
        if settings.bucket_mode == "quantile" and len(groups) > 1 and len(np.unique(groups.reward_std)) == 1:
            logger.warning("every group has the same reward deviation, so the quantile buckets say nothing")
        number_of = {group: number for number, members in enumerate(buckets.values()) for group in members}
        buckets_of_rows = torch.tensor([number_of[group] for group in groups.group_of_row.tolist()])
        numbers = batch.ask({BUCKET_KEY: buckets_of_rows}, {NUM_BUCKETS_KEY: len(buckets)})[0]
        tokens = mask.sum(-1).numpy()
        record = GradientAnalysis(
            bucket_mode=settings.bucket_mode,
            num_buckets=settings.num_buckets,
            batch=analysis.Batch(
                source="separate" if settings.is_separate else "training",
                num_groups=len(groups),
                num_rows=len(tokens),
                num_tokens=int(tokens.sum()),
                zero_variance_share=groups.zero_variance_share,
                filter=None if batch.filtered is None else Filter(**batch.filtered),
            ),
            buckets=bucket_records(numbers, buckets, groups, tokens),
            task_cosines=bucket_cosines(numbers),
            groups=group_table(buckets, groups),
            **self._about(global_step, numbers, start),
        )
        record = self._write(record, analysis_metrics(record))
        log_group_table(self.about.trackers, record)
        return record.metrics
