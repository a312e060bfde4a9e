# SPDX-License-Identifier: Apache-2.0
"""What both analyses share on the trainer's side: when they run, and what happens when one fails.

A failure is logged and counted, and training goes on; after three of them the analysis switches itself off.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..record.analysis import Cost, Loss, TrainingRun
from .config import BucketSettings, QuartileSettings
from .files import write_record

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3


@dataclass(frozen=True)
class AnalysisRun:
    """The run that is analysed."""

    root: str
    """Where to write: ``bisect_dump_dir``, absolute."""
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
    """A batch of R rows, with advantages, as an analysis sees it; nothing in it is changed."""

    tensors: Mapping[str, torch.Tensor]
    """(R, T) each: ``response_mask``, ``old_log_probs``, ``advantages``, ``responses``, ``token_level_scores``."""
    uids: Sequence[str]
    """The prompt's name of each row."""
    filtered: Mapping[str, float] | None
    """What the rollout filter did, in numbers; None where it did not run."""
    ask: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], list[dict[str, Any]]]
    """Have the workers analyse it: (further tensors with R rows, the request) -> each rank's numbers, in the order of
    the rows, filling ones last. A RuntimeError if a rank failed."""


class Reporter:
    """One analysis, at the steps that are due."""

    name: str  # in the log, of its timing and of its folder
    prefix: str  # of the failures among the metrics

    def __init__(self, settings: BucketSettings | QuartileSettings, run: AnalysisRun):
        self.settings, self.about = settings, run
        self.num_failures = 0

    def analyse(self, batch: AnalysisBatch, global_step: int) -> dict[str, float]:
        """Run one analysis, write it, and return its metrics."""
        raise NotImplementedError

    def run(
        self, batch: AnalysisBatch, global_step: int, metrics: dict[str, Any], timing_raw: dict[str, float]
    ) -> bool:
        """Analyse the training batch where the step is due, and return whether it was.

        The step's ``metrics`` are added to, and under the analysis's name the seconds that it took to ``timing_raw``.

        Raises:
            Exception: a vital one, or any while ``exit_after`` leaves no training to protect.
        """
        is_due = (global_step - 1) % self.settings.every == 0
        if not is_due or self.num_failures >= _MAX_FAILURES:
            return False
        start = time.perf_counter()
        try:
            metrics.update(self.analyse(batch, global_step))
        except Exception as error:
            if self.settings.exit_after or isinstance(error, self.about.vital):
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

    def _about(self, global_step: int, numbers: Mapping[str, Any], start: float) -> dict[str, Any]:
        """What both kinds of record hold: run, step, loss and cost, from the first rank's numbers."""
        return {
            "run": TrainingRun(**self.about.names),
            "global_step": global_step,
            "loss": Loss(terms=tuple(numbers["terms"]), **self.about.loss),
            "cost": Cost(
                forwards=numbers["forwards"],
                backwards=numbers["backwards"],
                probe_seconds=numbers["seconds"],
                seconds=time.perf_counter() - start,
            ),
        }

    def _write(self, record: Any, metrics: dict[str, float]) -> Any:
        """Write a record with its metrics, and return it."""
        record = replace(record, metrics=metrics)
        write_record(self.about.root, self.name, record)
        return record
