# SPDX-License-Identifier: Apache-2.0
"""Both analyses on the trainer's side, at the steps that are due."""

from collections.abc import Callable
from typing import Any

from .buckets.reporter import BucketAnalysis
from .config import BucketSettings, QuartileSettings
from .quartiles.reporter import QuartileAnalysis
from .reporter import Batch, Run


class Analyses:
    """Split the gradient that a batch is about to cause, by bucket and by quartile where these have settings.

    ``prepare``: (seed) -> a batch for the former that no update will see.
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
        """Analyse where the step is due, and say whether the run is to end here.

        ``seen`` gives the training batch as an analysis sees it, by its setting. ``metrics`` and ``timing_raw``, in
        seconds, are of the step and added to.
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
