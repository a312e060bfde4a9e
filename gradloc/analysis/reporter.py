# SPDX-License-Identifier: Apache-2.0
"""Run both analyses from the trainer: ask the workers at the steps that are due, and write the records.

``step_<N>.json`` holds the whole record; the analysis by bucket also writes its group table as CSV and logs it to W&B.
A failure is logged and counted, and training goes on; after three failures the analysis switches itself off.
"""

import csv
import io
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..record import analysis
from ..record.files import write_whole
from ..record.store import plain
from ..rollout_filter.groups import groups_of
from .buckets import analysis_metrics, bucket_cosines, bucket_records, group_table, split_groups
from .config import BucketSettings, QuartileSettings
from .parts import BUCKET_KEY, NUM_BUCKETS_KEY, NUM_SAMPLED_KEY, QUARTILE_KEY, SAMPLE_KEY
from .quartiles import assign, quartile_metrics, record_fields, sample_tokens

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3


@dataclass(frozen=True)
class AnalysisRun:
    """What an analysis needs to know about the run."""

    root: str
    """Folder to write into: ``bisect_dump_dir``, absolute."""
    seed: int
    trackers: dict[str, Any]
    """verl's open clients by name; filled once they are open."""
    names: Mapping[str, str]
    """``project`` and ``experiment``."""
    loss: Mapping[str, str]
    """``loss_mode``, ``loss_agg_mode`` and ``adv_estimator``."""
    vital: tuple[type[Exception], ...] = ()
    """Errors that end the run: when a worker is lost, the ranks that wait for it cannot go on."""


@dataclass(frozen=True)
class AnalysisBatch:
    """A batch of R rows with advantages, which an analysis does not change."""

    tensors: Mapping[str, torch.Tensor]
    """(R, T) each: ``response_mask``, ``old_log_probs``, ``advantages``, ``responses``, ``token_level_scores``."""
    uids: Sequence[str]
    """Name of each row's prompt."""
    filtered: Mapping[str, float] | None
    """Counts of the rollout filter; None where it did not run."""
    ask: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], list[dict[str, Any]]]
    """(further tensors with R rows, the request) -> each rank's numbers. The rows are in the batch's order; those that
    only fill up the ranks come last."""

    def measure(self, tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have the workers analyse the batch; see :attr:`ask`.

        Raises:
            RuntimeError: a rank failed.
        """
        records = self.ask(tensors, request)
        for record in records:
            if "error" in record:
                raise RuntimeError(record["error"])
        return records


class Reporter:
    """Runs one analysis at the steps that are due."""

    name: str
    """Name of the analysis in the log, of its timing and of its folder."""
    prefix: str
    """Prefix of ``failures`` among the metrics."""

    def __init__(self, settings: BucketSettings | QuartileSettings, run: AnalysisRun):
        self.settings, self.training = settings, run
        self.num_failures = 0

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
        """Run one analysis, write it, and return its metrics."""
        raise NotImplementedError

    def is_due(self, global_step: int) -> bool:
        """Return whether this step is analysed."""
        return (global_step - 1) % self.settings.every == 0

    def run(
        self,
        make_batch: Callable[[], AnalysisBatch],
        global_step: int,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
    ) -> bool:
        """Analyse the training batch where the step is due, and return whether it was.

        Adds the analysis's metrics to the step's ``metrics``, and the seconds that it took to ``timing_raw``.

        Raises:
            Exception: a vital one, or any while ``exit_after`` leaves no training to protect.
        """
        if not self.is_due(global_step) or self.num_failures >= _MAX_FAILURES:
            return False
        start = time.perf_counter()
        try:
            metrics.update(self.analyse(make_batch(), global_step))
        except Exception as error:
            if self.settings.exit_after or isinstance(error, self.training.vital):
                raise
            self.num_failures += 1
            logger.exception(
                "gradloc: the %s at step %s failed (failure %d of %d before it switches itself off): training goes on",
                self.name.replace("_", " "),
                global_step,
                self.num_failures,
                _MAX_FAILURES,
            )
        metrics[f"{self.prefix}/failures"] = self.num_failures
        timing_raw[self.name] = time.perf_counter() - start
        return True

    def _shared_fields(self, global_step: int, numbers: Mapping[str, Any], start: float) -> dict[str, Any]:
        """Return the fields that both kinds of record have: run, step, loss and cost, from the first rank's numbers."""
        return {
            "run": analysis.TrainingRun(**self.training.names),
            "global_step": global_step,
            "loss": analysis.Loss(terms=tuple(numbers["terms"]), **self.training.loss),
            "cost": analysis.Cost(
                forwards=numbers["forwards"],
                backwards=numbers["backwards"],
                probe_seconds=numbers["seconds"],
                seconds=time.perf_counter() - start,
            ),
        }


_SEEDS_APART = 1_000_003  # between the seeds of two steps: a prime above any seed that people type


class BucketReporter(Reporter):
    """Splits the gradient by term of the loss and by bucket of reward deviation.

    Args:
        settings: of this analysis.
        run: the run.
        prepare: (seed) -> a separate batch, which no update will see; None where the settings cannot ask for one.
    """

    name, prefix = "gradient_analysis", "grad_analysis"
    settings: BucketSettings

    def __init__(
        self, settings: BucketSettings, run: AnalysisRun, prepare: Callable[[int], AnalysisBatch] | None = None
    ):
        super().__init__(settings, run)
        self._prepare = prepare

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
        settings, start = self.settings, time.perf_counter()
        if settings.is_separate and self._prepare is not None:
            batch = self._prepare(self.training.seed + _SEEDS_APART * global_step)
        mask = batch.tensors["response_mask"]
        groups = groups_of(batch.uids, batch.tensors["token_level_scores"], mask)
        buckets = split_groups(groups.reward_std, settings.bucket_mode, settings.num_buckets)
        if settings.bucket_mode == "quantile" and len(groups) > 1 and len(np.unique(groups.reward_std)) == 1:
            logger.warning("every group has the same reward deviation, so the quantile buckets say nothing")
        bucket_of_group = {group: index for index, members in enumerate(buckets.values()) for group in members}
        bucket_of_row = torch.tensor([bucket_of_group[group] for group in groups.group_of_row.tolist()])
        numbers = batch.measure({BUCKET_KEY: bucket_of_row}, {NUM_BUCKETS_KEY: len(buckets)})[0]
        tokens = mask.sum(-1).numpy()
        record = analysis.GradientAnalysis(
            bucket_mode=settings.bucket_mode,
            num_buckets=settings.num_buckets,
            batch=analysis.Batch(
                source="separate" if settings.is_separate else "training",
                num_groups=len(groups),
                num_rows=len(tokens),
                num_tokens=int(tokens.sum()),
                zero_variance_share=groups.zero_variance_share,
                filter=None if batch.filtered is None else analysis.Filter(**batch.filtered),
            ),
            buckets=bucket_records(numbers, buckets, groups, tokens),
            task_cosines=bucket_cosines(numbers),
            groups=group_table(buckets, groups),
            **self._shared_fields(global_step, numbers, start),
        )
        record = replace(record, metrics=analysis_metrics(record))
        write_record(self.training.root, self.name, record)
        log_group_table(self.training.trackers, record)
        return record.metrics


class QuartileReporter(Reporter):
    """Splits the batch's gradient by the tokens' probability."""

    name = prefix = "quartile_analysis"
    settings: QuartileSettings

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
        start = time.perf_counter()
        arrays = {key: batch.tensors[key].float().numpy() for key in ("old_log_probs", "advantages")}
        arrays["responses"] = batch.tensors["responses"].numpy()
        mask = batch.tensors["response_mask"].bool().numpy()
        quartiles = assign(arrays["old_log_probs"], mask, self.settings.split)
        sampled = sample_tokens(quartiles, self.settings.num_tokens, self.training.seed + global_step)
        sample = torch.full(quartiles.shape, -1)
        sample[sampled[:, 0], sampled[:, 1]] = torch.arange(len(sampled))
        tensors = {
            BUCKET_KEY: torch.zeros(len(quartiles), dtype=torch.long),
            QUARTILE_KEY: torch.from_numpy(quartiles),
            SAMPLE_KEY: sample,
        }
        by_rank = batch.measure(tensors, {NUM_SAMPLED_KEY: len(sampled)})
        record = analysis.QuartileAnalysis(
            split=self.settings.split,
            num_rows=len(quartiles),
            **record_fields(by_rank, arrays, quartiles, sampled),
            **self._shared_fields(global_step, by_rank[0], start),
        )
        record = replace(record, metrics=quartile_metrics(record))
        write_record(self.training.root, self.name, record)
        return record.metrics


# ---- on disk, and in W&B

_COLUMNS = ["bucket", "group_id", "reward_std"]


def write_record(root: str, name: str, record: analysis.GradientAnalysis | analysis.QuartileAnalysis) -> Path:
    """Write one analysis into the folder ``name`` of ``bisect_dump_dir``, and return the path of its JSON file.

    A record of the same step, from before a resume, is replaced.
    """
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(record, analysis.GradientAnalysis):
        table = io.StringIO()
        writer = csv.DictWriter(table, [field.name for field in fields(analysis.Group)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(vars, record.groups))
        write_whole(folder / f"group_rv_table_step_{record.global_step}.csv", table.getvalue())
    text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False, indent=1)
    path = folder / f"step_{record.global_step}.json"
    write_whole(path, text + "\n")
    return path


def log_group_table(trackers: Mapping[str, Any], record: analysis.GradientAnalysis) -> None:
    """Log each bucket's ``grad_norm/<bucket>/group_rv_table`` to W&B, if it is among verl's open clients."""
    rows: dict[str, list[list[Any]]] = {}
    for group in record.groups:
        rows.setdefault(group.bucket, []).append([getattr(group, column) for column in _COLUMNS])
    for client in (trackers[name] for name in ("wandb", "vemlp_wandb") if name in trackers):
        if client.run is None:
            continue
        tables = {
            f"grad_norm/{bucket}/group_rv_table": client.Table(columns=_COLUMNS, data=data)
            for bucket, data in rows.items()
        }
        # the step stays open: verl logs its scalars under the same one
        client.log(tables, step=record.global_step, commit=False)
