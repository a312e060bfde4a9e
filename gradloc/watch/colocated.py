# SPDX-License-Identifier: Apache-2.0
"""A trainer whose processes are all alike: each has the rank's side of a search, and the first the driver's, too.

They exchange two small messages an optimizer step.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..core.gradients import GradientSpace
from ..core.ranks import Ranks
from ..loop.batch import BatchView, Rows, joined
from ..loop.driver import AbortedBySpike, Driver, sequence_ids
from ..loop.localizer import Localizer
from ..loop.wire import Policy
from .analyses import LoopAnalyses
from .step import LoopStep

logger = logging.getLogger(__name__)


class Colocated:
    """Looks into the steps of one trainer; subclasses add the powers that the localizer asks for.

    Args:
        ranks: the trainer's processes.
        settings: of spikes; None: none are looked for.
        make_driver: called on the first process.
    """

    def __init__(self, ranks: Ranks, settings: Any, make_driver: Callable[[], Driver]):
        self.ranks, self.settings = ranks, settings
        self.step: Any = None
        """The optimizer step that is being made; None between two."""
        self.localizer = None if settings is None else Localizer(self, ranks, settings)  # type: ignore[arg-type]
        self.driver = None if settings is None or not ranks.is_first else make_driver()
        self.analyses: LoopAnalyses | None = None
        self.is_analysing = False
        """Whether steps of the optimizer are an analysis' own, which are taken back."""
        self.stage_name = ""
        """Of Lopti's, which the step that is being made is of."""
        self._is_told = False

    def begin_step(self, step: LoopStep, module: torch.nn.Module) -> None:
        """Before the first micro-batch's forward."""
        self.step = step
        if self.localizer is not None:
            self.space = self.make_space(module)
            self.localizer.begin_update(None, self.space, are_all_here=False)
            self.localizer.begin_mini_batch(step)

    def make_space(self, module: torch.nn.Module) -> GradientSpace:
        """The trained parameters of a step; all ranks make theirs together."""
        return GradientSpace(module, self.ranks)

    def end_step(self, norm: Any, global_step: int) -> tuple[Any, dict[str, float]]:
        """After the last micro-batch's backward and clipping: ask the driver, look, tell the driver.

        Args:
            norm: of the gradient, before clipping.
            global_step: the trainer's number of this step, from 1.

        Returns:
            The norm of the gradient that the optimizer is given, and on the first process our metrics.

        Raises:
            AbortedBySpike: on every process, where a spike is to stop the run.
        """
        step, localizer, ranks = self.step, self.localizer, self.ranks
        assert localizer is not None
        localizer.ask_replicas()
        counts = self._counts(step)
        if not any(counts[-1]):
            self._tell_once("steps whose log-probs nobody asked for as the trainer's own loss does are not looked into")
            localizer.end_update()
            step.release()
            return norm, {}
        policy, norm = self._policy(step, global_step, *counts), whole(norm)
        if policy is not None:
            policy = self.before_look(norm, policy)
        taken = localizer.before_step(norm, policy)
        localizer.end_update()
        analysed = self._analyse(float(norm), global_step)
        step.release()
        is_written = any(spike.is_written for spike in localizer.outcomes)
        by_rank = ranks.gather_first((localizer.report(), self.rows(step) if is_written else step.brief()))
        metrics: dict[str, float] = {}
        if by_rank is not None and self.driver is not None:
            reports, rows = zip(*by_rank, strict=True)
            batch = self.view(rows) if is_written else brief_view(rows, self.signal)
            ours = self.driver.after_update(reports, batch)
            metrics = {name: float(value) for name, (value,) in ours.items()} | analysed
        if any(spike.taken == "abort" for spike in localizer.outcomes):
            raise AbortedBySpike("gradloc stopped the run at a gradient spike: the first process says why.")
        is_other = any(spike.taken != "observe" for spike in localizer.outcomes)
        return taken if is_other else norm, metrics

    is_unclipped = False
    """See :class:`~..loop.localizer.ActorPowers`."""

    def before_look(self, norm: torch.Tensor, policy: Policy) -> Policy | None:
        """Prepare a look into the step, on all ranks together: each has as many micro-batches. None: no look."""
        return policy

    signal = "advantages"
    """What :meth:`.step.LoopStep.brief` tells beside the number of tokens, by the batch's names."""

    def _analyse(self, norm: float, global_step: int) -> dict[str, float]:
        """Take the step apart, where an analysis is due; returns its metrics on the first process."""
        if self.analyses is None or not self.analyses.are_due(global_step):
            return {}

        def view() -> BatchView | None:
            by_rank = self.ranks.gather_first(self.rows(self.step))
            return None if by_rank is None else self.view(by_rank)

        self.is_analysing = True
        try:
            return self.analyses.run(global_step, partial(self.objection_to_analysis, norm), self, view)
        finally:
            self.is_analysing = False

    def objection_to_analysis(self, norm: float) -> str:
        """Prepare the step for an analysis, on all ranks together; a sentence where there can be none."""
        return "" if math.isfinite(norm) else "the gradient of this step is not finite"

    def rows(self, step: LoopStep) -> Rows:
        """This rank's, where an event is written; all ranks call it together."""
        return step.all_rows()

    def view(self, by_rank: Sequence[Rows]) -> BatchView:
        """All ranks' rows as one batch."""
        return view_of(by_rank)

    def _counts(self, step: LoopStep) -> list[list[float]]:
        """Each rank's response tokens, rows and micro-batches."""
        ranks, size = self.ranks, self.ranks.size
        mine = [float(value) for value in (*step.counts(), step.num_micro_batches)]
        everyones = [0.0] * (len(mine) * size)
        everyones[ranks.rank :: size] = mine
        counts = ranks.sum(everyones)
        return [counts[first : first + size] for first in range(0, len(counts), size)]

    def _policy(
        self, step: LoopStep, global_step: int, tokens: list[float], rows: list[float], micro_batches: list[float]
    ) -> Policy | None:
        """The driver's of this step, on every rank; None where the step cannot be looked into."""
        ranks = self.ranks
        step.first_row = int(sum(rows[: ranks.rank]))
        policy = (
            None if self.driver is None else self.driver.before_update([int(sum(tokens))], global_step, self.stage_name)
        )
        policy = ranks.sent_by(0, policy)
        if len(set(micro_batches)) == 1:
            return policy
        found = ", ".join(f"{number:.0f}" for number in micro_batches)
        self._tell_once(f"steps are looked into where all ranks run as many micro-batches, found {found}")
        return None

    def _tell_once(self, why: str) -> None:
        if self.ranks.is_first and not self._is_told:
            self._is_told = True
            logger.warning("gradloc: %s", why)


def whole(norm: Any) -> torch.Tensor:
    """A gradient norm as a plain scalar tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)


def view_of(by_rank: Sequence[Rows]) -> BatchView:
    """All ranks' rows, one rank after the other; names that come more than once are those of prompts."""
    shared = set.intersection(*(set(rows) for rows in by_rank))
    rows = joined([{name: part[name] for name in by_rank[0] if name in shared} for part in by_rank])
    names = rows.pop("names")
    rows["input_ids"] = rows["responses"]
    rows["loss_weights"] = rows["loss_weights"] * int(rows["response_mask"].sum())
    if "advantages" in rows:
        del rows["loss_weights"]
    labels = {"sequence_id": names} if any(names) else {}
    if max(Counter(names).values()) > 1 and any(names):
        labels = {"uid": names, "sequence_id": sequence_ids(names)}
    return BatchView(rows, labels)


def brief_view(by_rank: Sequence[list[tuple[int, float]]], signal: str) -> BatchView:
    """A batch of rows of these lengths, whose tokens have this signal each: enough to learn what is typical.

    Args:
        by_rank: pairs of a row's number of tokens and its signal.
        signal: the tensor's name, such as ``advantages``.
    """
    lengths, values = torch.tensor([row for rows in by_rank for row in rows]).T
    mask = torch.tensor(range(int(lengths.max()))) < lengths.unsqueeze(1)
    return BatchView({"response_mask": mask, signal: values.unsqueeze(1).expand_as(mask)}, {})
