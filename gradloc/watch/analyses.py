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
from ..analysis.reporter import AnalysisBatch, AnalysisRun, BucketAnalysis, QuartileReporter, Reporter
from ..core.ranks import LostRank
from ..loop.batch import BatchView


class LoopAnalyses:
    """The analyses of one trainer.

    Args:
        settings: from :func:`~..analysis.config.taken_from`.
        root: the folder for events.
        names: of the run.
    """

    def __init__(self, settings: Analyses, root: str, names: Mapping[str, str]):
        buckets, quartiles = settings
        own = dict.fromkeys(("loss_mode", "loss_agg_mode", "adv_estimator"), "the loop's own")
        run = AnalysisRun(root, seed=0, trackers={}, names=names, loss=own, vital=(LostRank,))
        self.reporters: list[Reporter] = [] if quartiles is None else [QuartileReporter(quartiles, run)]
        if buckets is not None:
            self.reporters.append(BucketAnalysis(buckets, run, _no_batch))

    def are_due(self, number: int) -> bool:
        """Return whether any analysis is due at this optimizer step, by its number from 1."""
        return any(reporter.is_due(number) for reporter in self.reporters)

    def run(
        self, number: int, objection_of: Callable[[], str], trainer: Any, view: Callable[[], BatchView | None]
    ) -> dict[str, float]:
        """Analyse a step; all processes call this together. Returns the first one's metrics.

        Args:
            number: of the optimizer step.
            objection_of: prepares the step; a sentence where no analysis can be made of it, on all processes the same.
            trainer: has ``step``, ``space``, ``ranks``, ``optimizer``, ``clip`` and ``clip_limit``.
            view: gives all ranks' rows, on the first process.
        """
        ranks, objection = trainer.ranks, objection_of()
        batch = view() if not objection else None

        def measured(asked: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]) -> list[dict[str, Any]] | None:
            tensors, request = asked

            def labels(name: str, micro_batch: int) -> torch.Tensor:
                values = tensors[name][trainer.step.rows(micro_batch)]
                return values if values.dim() == 1 else values[:, : trainer.step.token_mask(micro_batch).shape[1]]

            of = Analysed(
                trainer.step, labels, trainer.space, ranks, trainer.optimizer, trainer.clip, trainer.clip_limit
            )
            return ranks.gather_first(measure(lambda: of, trainer.space, request))

        if not ranks.is_first:
            while (asked := ranks.broadcast_from(0, None)) is not None:
                measured(asked)
            return {}

        def ask(tensors: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
            return measured(ranks.broadcast_from(0, (tensors, request))) or []

        metrics: dict[str, Any] = {}
        for reporter in self.reporters:
            reporter.run(lambda: batch_of(batch, objection, ask), number, metrics, {})
        ranks.broadcast_from(0, None)
        return metrics


def _no_batch(seed: int) -> AnalysisBatch:
    raise NotImplementedError("a loop rolls out no batch for an analysis")


def batch_of(view: BatchView | None, objection: str, ask: Any) -> AnalysisBatch:
    """Return the rows of a step, for an analysis.

    Raises:
        RuntimeError: one sentence, where no analysis can be made of the step.
    """
    if view is None or objection:
        raise RuntimeError(objection)
    tensors, names = dict(view.tensors), view.labels.get("uid")
    for name, instead in (("old_log_probs", "log_probs"), ("advantages", "loss_weights")):
        if name not in tensors:
            tensors[name] = tensors[instead]
    mask = tensors["response_mask"]

    def ask_if_known(labels: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> list[dict[str, Any]]:
        if QUARTILE_KEY not in labels and names is None:
            raise RuntimeError(
                "buckets are of groups of rollouts: note(rows=...) with one name for those of a prompt, and rewards=..."
            )
        return ask(labels, request)

    if "token_level_scores" not in tensors:  # of the groups' advantages, where no rewards were noted
        means = (tensors["advantages"] * mask).sum(1) / mask.sum(1).clamp(min=1)
        tensors["token_level_scores"] = torch.nn.functional.pad(means.unsqueeze(1), (0, mask.shape[1] - 1))
    uids = names if names is not None else [str(row) for row in range(len(mask))]
    return AnalysisBatch(tensors, uids, None, ask_if_known)
