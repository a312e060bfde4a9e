# SPDX-License-Identifier: Apache-2.0
"""The gradient of each term of the loss over each bucket.

The rows of a bucket are run together, whatever micro-batches they came from, so one analysis costs one forward and
about one pass per term (forward and backward), however many buckets there are. Ranks hold unequal parts of a bucket:
one that has run out of rows runs a row with zero weight, because its peers' collectives wait for it.
"""

from typing import TypedDict

import torch

from ...core.gradients import Gradient, GradientSpace
from ...core.ranks import Ranks
from ..actor import BUCKET_KEY, Actor, Rows
from ..coefficients import Frozen, forward, freeze
from ..rows import RowProbe, Weights, add_up


class BucketNumbers(TypedDict):
    """What the ranks found, of the additive parts; per bucket means one entry each and a last one for the batch."""

    terms: list[str]
    norms: list[dict[str, float]]
    """By term, per bucket."""
    dots: list[dict[str, float]]
    """Inner products of two terms, per bucket."""
    weights: list[list[float]]
    """Bucket x term."""
    losses: list[list[float]]
    """Bucket x term."""
    task_dots: list[list[float]]
    """Bucket x bucket."""
    forwards: int
    """On each rank."""
    backwards: int


class BucketProbe(RowProbe):
    """One analysis on one rank; every rank makes the same calls in the same order.

    Gradients that have to be kept, one per bucket and two per term, wait in host memory.
    """

    def __init__(self, actor: Actor, ranks: Ranks, space: GradientSpace):
        super().__init__(actor, ranks, space)
        self.whole: dict[str, Gradient] = {}
        """Per term, the whole batch's gradient: the sum over the buckets."""
        self.norms: list[dict[str, float]] = []
        self.dots: list[dict[str, float]] = []
        self._task: list[Gradient] = []
        self._frozen: Frozen | None = None

    def measure(self, rows: Rows, num_buckets: int) -> None:
        """Fill in everything that :meth:`record` reports.

        Args:
            rows: this rank's, as many as every other rank has, with ``BUCKET_KEY``.
            num_buckets: K, of the whole batch.
        """
        self._hold(rows)
        forwarded = forward(self.actor, rows)
        self.num_forwards += len(forwarded)
        buckets = rows[BUCKET_KEY]
        num_rows = int(self.ranks.sum([float((buckets >= 0).sum())])[0])
        sizes = {"num_local": len(buckets), "num_buckets": num_buckets, "num_rows": num_rows}
        self._frozen = self.ranks.agree(lambda: freeze(self.actor, forwarded, **sizes, dp_size=self.ranks.size))
        plan = self.ranks.agree(lambda: self._plan(buckets, num_buckets))
        lengths = {key: len(chunks) for key, chunks in plan.items()}
        everyone = self.ranks.gather(lengths)
        for bucket in range(num_buckets):
            parts = {}
            for term in self.actor.terms:
                key = (bucket, term)
                num_chunks = max(lengths[key] for lengths in everyone)
                parts[term] = self._gradient(self._weights(term), plan[key], num_chunks)
            self._keep(parts)
        self._summarize(self.whole)

    def record(self) -> BucketNumbers:
        """What was found, the same on every rank."""
        shape = self._frozen.weights.shape
        numbers = torch.cat([self._frozen.weights.flatten(), self._frozen.losses.flatten()])
        weights, losses = torch.tensor(self.ranks.sum(numbers.tolist()), dtype=torch.float64).view(2, *shape)
        return {
            "terms": list(self.actor.terms),
            "norms": self.norms,
            "dots": self.dots,
            "weights": weights.tolist(),
            "losses": losses.tolist(),
            "task_dots": [[self._dot(left, right) for right in self._task] for left in self._task],
            "forwards": self.num_forwards,
            "backwards": self.num_backwards,
        }

    # ---- inside

    def _plan(self, buckets: torch.Tensor, num_buckets: int) -> dict[tuple[int, str], list[list[int]]]:
        """Which of this rank's rows are run together, per bucket and term; rows that the term ignores are not."""
        plan = {}
        for term in self.actor.terms:
            counts = (self._frozen.coefficients[term] != 0).any(-1).cpu()  # NaN counts
            for bucket in range(num_buckets):
                plan[bucket, term] = self._chunks((buckets == bucket) & counts)
        return plan

    def _weights(self, term: str) -> Weights:
        coefficients = self._frozen.coefficients[term]
        return Weights(entropy=coefficients) if term == "entropy" else Weights(log_prob=coefficients)

    def _keep(self, parts: dict[str, Gradient]) -> None:
        self._summarize(parts)
        self._task.append(parts["task"])
        for term, part in parts.items():
            self.whole[term] = add_up(self.whole.get(term), part)

    def _summarize(self, parts: dict[str, Gradient]) -> None:
        """Note the norms of the terms' gradients and their inner products."""
        self.norms.append({term: self.space.norm(part) for term, part in parts.items()})
        pairs = [(a, b) for index, a in enumerate(self.actor.terms) for b in self.actor.terms[index + 1 :]]
        self.dots.append({f"{a}_{b}": self._dot(parts[a], parts[b]) for a, b in pairs})

    def _dot(self, left: Gradient, right: Gradient) -> float:
        return float(self.space.dots(left, right).sum())
