# SPDX-License-Identifier: Apache-2.0
"""Run gradient analyses on the step that a trainer whose processes are all alike is about to take.

The first process decides what is measured and writes the records; the others measure with it, until it says that it has
enough.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..analysis.config import Analyses
from ..analysis.parts import QUARTILE_KEY, Analysed, measure
from ..analysis.reporter import AnalysisBatch, AnalysisRun, BucketReporter, QuartileReporter, Reporter
from ..core.ranks import LostRank
from ..loop.batch import BatchView, at_first


class LoopAnalyses:
    """The analyses of one trainer, which write under ``root``, the folder for events.

    ``names`` are the run's ``project`` and ``experiment``.
    """

    def __init__(self, settings: Analyses, root: str, names: Mapping[str, str]):
        buckets, quartiles = settings
        loss = dict.fromkeys(("loss_mode", "loss_agg_mode", "adv_estimator"), "the loop's own")
        run = AnalysisRun(root, seed=0, trackers={}, names=names, loss=loss, vital=(LostRank,))
        self.reporters: list[Reporter] = [] if quartiles is None else [QuartileReporter(quartiles, run)]
        if buckets is not None:
            self.reporters.append(BucketReporter(buckets, run))

    def are_due(self, number: int) -> bool:
        """Return whether any analysis is due at this optimizer step, by its number from 1."""
        return any(reporter.is_due(number) for reporter in self.reporters)

    def run(
        self, number: int, prepare: Callable[[], str], trainer: Any, view: Callable[[], BatchView | None]
    ) -> dict[str, float]:
        """Analyse a step; all processes call this together. Returns the first one's metrics.

        Args:
            number: of the optimizer step.
            prepare: prepares the step; returns why no analysis can be made of it, the same on all processes, or "".
            trainer: has ``step``, ``space``, ``ranks``, ``optimizer``, ``clip`` and ``clip_limit``.
            view: gives all ranks' rows, on the first process.
        """
        ranks, objection = trainer.ranks, prepare()
        batch = None if objection else view()
        if not ranks.is_first:
            while (request := ranks.broadcast_from(0, None)) is not None:
                _measure(trainer, *request)
            return {}

        def ask(tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
            return _measure(trainer, *ranks.broadcast_from(0, (tensors, request))) or []

        metrics: dict[str, Any] = {}
        for reporter in self.reporters:
            reporter.run(lambda: _analysis_batch(batch, objection, ask), number, metrics, {})
        ranks.broadcast_from(0, None)
        return metrics


def _measure(
    trainer: Any, tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Measure this process' part of the step; return all processes' numbers, on the first one."""

    def labels(name: str, micro_batch: int) -> torch.Tensor:
        values = tensors[name][trainer.step.rows(micro_batch)]
        return values if values.dim() == 1 else values[:, : trainer.step.token_mask(micro_batch).shape[1]]

    step, space, ranks = trainer.step, trainer.space, trainer.ranks
    analysed = Analysed(step, labels, space, ranks, trainer.optimizer, trainer.clip, trainer.clip_limit)
    return ranks.gather_first(measure(lambda: analysed, space, request))


def _analysis_batch(view: BatchView | None, objection: str, ask: Any) -> AnalysisBatch:
    """Return a step's rows as an analysis reads them.

    Raises:
        RuntimeError: one sentence, where no analysis can be made of the step.
    """
    if view is None or objection:
        raise RuntimeError(objection)
    tensors, names = dict(view.tensors), view.labels.get("uid")
    for name, substitute in (("old_log_probs", "log_probs"), ("advantages", "loss_weights")):
        if name not in tensors:
            tensors[name] = tensors[substitute]
    mask = tensors["response_mask"]
    if "token_level_scores" not in tensors:  # no rewards were noted: a row's mean advantage, at its first position
        means = (tensors["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1)
        tensors["token_level_scores"] = at_first(means, mask)

    def ask_with_groups(labels: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        if QUARTILE_KEY not in labels and names is None:
            raise RuntimeError(
                "buckets are of groups of rollouts: note(rows=...) with one name for those of a prompt, and rewards=..."
            )
        return ask(labels, request)

    uids = names if names is not None else [str(row) for row in range(len(mask))]
    return AnalysisBatch(tensors, uids, None, ask_with_groups)
