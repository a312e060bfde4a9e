# SPDX-License-Identifier: Apache-2.0
"""Both analyses on the trainer's side, at the steps that are due."""

from collections.abc import Callable
from typing import Any

from .buckets.reporter import BucketAnalysis
from .config import BucketSettings, QuartileSettings
from .quartiles.reporter import QuartileReporter
from .reporter import AnalysisBatch, AnalysisRun


class Analyses:
    """Split the gradient that a batch is about to cause, by bucket, by quartile or both; None: that one is off.

    ``prepare``: (seed) -> a batch for the analysis by bucket that no update will see.
    """

    def __init__(
        self,
        run: AnalysisRun,
        buckets: BucketSettings | None,
        quartiles: QuartileSettings | None,
        prepare: Callable[[int], AnalysisBatch],
    ):
        self.trackers = run.trackers
        self.quartiles = None if quartiles is None else QuartileReporter(quartiles, run)
        self.buckets = None if buckets is None else BucketAnalysis(buckets, run, prepare)

    def analyse(
        self,
        seen: Callable[[str], AnalysisBatch],
        global_step: int,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
    ) -> bool:
        """Analyse where the step is due, and return whether the run is to end here.

        The step's ``metrics`` and ``timing_raw`` are added to. ``seen``: (the setting of an analysis) -> the training
        batch as it sees it.
        """
        for analysis in (self.quartiles, self.buckets):
            if analysis is None:
                continue
            was_due = analysis.run(seen(f"trainer.{analysis.name}_mode"), global_step, metrics, timing_raw)
            if was_due and analysis.settings.exit_after:
                metrics["training/global_step"] = global_step
                metrics["trainer/exited_after_gradient_analysis"] = 1.0
                metrics["timing_s/gradient_analysis"] = timing_raw["gradient_analysis"]
                return True
        return False
