# SPDX-License-Identifier: Apache-2.0
"""What the analyses have in common on the trainer's side: when they run, and what happens when one fails.

A failure is logged and counted, and training goes on; after three of them the analysis switches itself off.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..record.analysis import Cost, Loss, TrainingRun

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3


@dataclass(frozen=True)
class Run:
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
    """Errors that no analysis may swallow: after the loss of a worker the ranks that wait for it cannot go on."""


@dataclass(frozen=True)
class Batch:
    """A batch of R rows, with advantages, as an analysis sees it; nothing of it is changed."""

    tensors: Mapping[str, torch.Tensor]
    """(R, T) each: ``response_mask``, ``old_log_probs``, ``advantages``, ``responses``, ``token_level_scores``."""
    uids: Sequence[str]
    """The prompt's name of each row."""
    filtered: Mapping[str, float] | None
    """What the rollout filter did, in numbers; None where it did not run."""
    ask: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], list[dict[str, Any]]]
    """Have the workers analyse it: (further tensors with R rows, further settings) -> what each rank found, in the
    order of the rows; the last rank's rows may end in filling ones. A RuntimeError when a rank failed."""


class _Settings(Protocol):
    every: int
    exit_after: bool


class Reporter:
    """One analysis, at the steps that are due."""

    name = ""
    """In the log and among the timings."""
    prefix = ""
    """Of the number of failures among the metrics."""

    def __init__(self, settings: _Settings, run: Run):
        self.settings, self.about = settings, run
        self.num_failures = 0

    def analyse(self, batch: Batch, global_step: int) -> dict[str, float]:
        """Run one analysis, write it, and return its metrics."""
        raise NotImplementedError

    def run(self, batch: Batch, global_step: int, metrics: dict[str, Any], timing_raw: dict[str, float]) -> bool:
        """Analyse where the step is due.

        Args:
            batch: the training batch.
            global_step: the trainer's.
            metrics: of the step; added to.
            timing_raw: of the step; the analysis's seconds are added under its name.

        Returns:
            Whether it was due.

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

    def _head(self, global_step: int, terms: Sequence[str]) -> dict[str, Any]:
        """Which run, step and loss a record is about: fields that both kinds have."""
        run = self.about
        return {
            "run": TrainingRun(**run.names),
            "global_step": global_step,
            "loss": Loss(terms=tuple(terms), **run.loss),
        }

    @staticmethod
    def _cost(raw: Mapping[str, Any], start: float) -> Cost:
        """What the workers counted, and the seconds since ``start``."""
        return Cost(
            forwards=raw["forwards"],
            backwards=raw["backwards"],
            probe_seconds=raw["seconds"],
            seconds=time.perf_counter() - start,
        )
