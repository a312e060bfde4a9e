# SPDX-License-Identifier: Apache-2.0
"""Both analyses on the trainer's side, at the steps that are due."""

from collections.abc import Callable
from typing import Any

from .buckets.reporter import BucketAnalysis
from .config import BucketSettings, QuartileSettings
from .quartiles.reporter import QuartileAnalysis
from .reporter import Batch, Run


class Analyses:
    """Split the gradient that a batch is about to cause.

    Args:
        run: what is analysed.
        buckets: None: no analysis by bucket.
        quartiles: None: no analysis by quartile.
        prepare: (seed) -> a batch for the former that no update will see.
    """

    def __init__(
        self,
        run: Run,
        buckets: BucketSettings | None,
        quartiles: QuartileSettings | None,
        prepare: Callable[[int], Batch],
    ):
        self.trackers = run.trackers
        self.quartiles = None if quartiles is None else QuartileAnalysis(quartiles, run)
        self.buckets = None if buckets is None else BucketAnalysis(buckets, run, prepare)

    def analyse(
        self, seen: Callable[[str], Batch], global_step: int, metrics: dict[str, Any], timing_raw: dict[str, float]
    ) -> bool:
        """Analyse where the step is due.

        Args:
            seen: (the setting of an analysis) -> the training batch as it sees it.
            global_step: the trainer's.
            metrics: of the step; added to.
            timing_raw: of the step; ``gradient_analysis`` and ``quartile_analysis`` are added, in seconds.

        Returns:
            Whether the run is to end here.
        """
        if self.quartiles is not None:
            self.quartiles.run(seen("trainer.quartile_analysis_mode"), global_step, metrics, timing_raw)
        if self.buckets is None:
            return False
        was_due = self.buckets.run(seen("trainer.gradient_analysis_mode"), global_step, metrics, timing_raw)
        if not was_due or not self.buckets.settings.exit_after:
            return False
        metrics["training/global_step"] = global_step
        metrics["trainer/exited_after_gradient_analysis"] = 1.0
        metrics["timing_s/gradient_analysis"] = timing_raw["gradient_analysis"]
        return True
