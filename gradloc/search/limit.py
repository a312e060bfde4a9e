# SPDX-License-Identifier: Apache-2.0
"""Limit a search's cost, and give the settings' defaults. Imports no torch, since ``gradloc check`` reads it."""

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.probe import Prober

STRATEGIES = ("auto", "share", "bisect")
MAX_CULPRITS, MAX_STEPS, BUDGET = 8, 4.0, 128
"""Defaults: how many culprits are named, what a search may cost in updates, probes of the published bisection."""
MAX_CURES = 2
"""Default: settings measured for one spike."""

PROBE = 3
"""The cost of a forward of one micro-batch and its backward, which counts as two, in f."""
_MICRO_BATCHES = 16  # the published budget is enough for this many
_LEAST_SECONDS = 2.0  # an update counts as at least this long: on a toy model all is overhead, and no time is lost
_LEAST_UPDATE = 10  # f: an update of one or two micro-batches counts as this much, since a culprit costs the same there
_LEAST_BISECTION_SECONDS = 60.0  # a bisection may always take this long: its budget of passes is the published one


class Limit:
    """The most that a search may cost: some of this run's own updates, in passes and in time, or the published budget.

    Costs are in f, a forward of one micro-batch; an update of M micro-batches is 3 M f, and counts as 10 f at least.

    Args:
        num_micro_batches: M.
        max_steps: updates, at least 1.
        update_seconds: how long an update of this run takes; None if that is unknown, as in a replay.
        budget: the published bisection's, in probes, in proportion more beyond 16 micro-batches; None for others.
            Its passes are limited by this, its time by ``max_steps`` updates, but never to less than a minute.
    """

    def __init__(
        self, num_micro_batches: int, max_steps: float, update_seconds: float | None = None, budget: int | None = None
    ):
        update = PROBE * num_micro_batches
        least = max(update, _LEAST_UPDATE)
        self.most: float = max_steps * least
        """The limit in f."""
        self.seconds = max_steps * max(least / update * (update_seconds or math.inf), _LEAST_SECONDS)
        self._by_time = self.words = f"what search.max_steps={max_steps:g} allows is spent"
        """``words``: why a search ends, once nothing is left."""
        if budget:
            self.most = PROBE * budget * max(1.0, num_micro_batches / _MICRO_BATCHES)
            self.seconds = max(self.seconds, _LEAST_BISECTION_SECONDS)
            self.words = f"the budget of {budget} probes was used up"
        self._is_published = budget is not None
        self._started = time.perf_counter()

    def allow(self, cost: float, seconds: float) -> None:
        """Raise the limit by the cost of a question that comes before the search.

        Args:
            cost: in f, the same on all ranks.
            seconds: on this rank.
        """
        self.most += cost
        self._started += seconds

    def left(self, prober: "Prober", certificate: int, counts_time: bool = True) -> float:
        """Return what may still be spent, in f, and set :attr:`words` where time is shorter than passes.

        All ranks call this together, and the slowest one's clock counts.

        Args:
            prober: whose cost counts.
            certificate: f kept back for the certificate; the published budget does not count that.
            counts_time: if False, passes alone count.
        """
        spent = float(prober.cost)
        if counts_time and math.isfinite(self.seconds):
            (elapsed,) = prober.ranks.max([time.perf_counter() - self._started])
            by_time = elapsed / self.seconds * self.most
            if by_time > spent:
                spent, self.words = by_time, self._by_time
        return self.most - spent - (0 if self._is_published else certificate)
