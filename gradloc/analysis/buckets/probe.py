# SPDX-License-Identifier: Apache-2.0
"""The gradient of each term of the loss over each bucket.

An analysis costs one forward and about one pass (forward and backward) per term, however many buckets there are.
"""

from functools import partial
from itertools import combinations
from typing import TypedDict

import torch

from ...core.gradients import Gradient
from ..actor import BUCKET_KEY
from ..rows import RowProbe, add_up, only
from .coefficients import BucketCoefficients


class BucketNumbers(TypedDict):
    """What the ranks measured of the additive parts; ``norms`` and ``dots`` per bucket, the whole batch's last."""

    terms: list[str]
    norms: list[dict[str, float]]  # by term
    dots: list[dict[str, float]]  # inner products of two terms
    weights: list[list[float]]  # bucket x term
    losses: list[list[float]]  # bucket x term
    task_dots: list[list[float]]  # bucket x bucket
    forwards: int  # on each rank
    backwards: int


class BucketProbe(RowProbe):
    """One analysis on one rank. One gradient per bucket and two per term wait in host memory."""

    whole: dict[str, Gradient]
    """Per term, the whole batch's gradient: the sum over the buckets."""

    def measure(self, num_buckets: int) -> BucketNumbers:
        """The numbers, the same on every rank, of K buckets; each row's is its ``BUCKET_KEY``."""
        self.whole, self._norms, self._dots = {}, [], []
        self._task: list[Gradient] = []
        buckets = self.rows[BUCKET_KEY]
        num_rows = int(self.ranks.sum([float((buckets >= 0).sum())])[0])
        coefficients = BucketCoefficients(self.actor, self.rows, num_buckets, num_rows, self.ranks.size)
        for part in self.actor.micro_batches(self.rows):
            self.num_forwards += 1
            with torch.no_grad():
                log_prob, entropy = self.actor.forward(part.inputs)
            self.ranks.agree(partial(coefficients.add, part, log_prob, entropy))
        for bucket in range(num_buckets):
            is_inside = (buckets == bucket).unsqueeze(1).to(self.actor.device)
            self._keep({term: self.gradient(only(coefficients.of(term), is_inside)) for term in self.actor.terms})
        self._summarize(self.whole)
        return {
            "terms": list(self.actor.terms),
            "norms": self._norms,
            "dots": self._dots,
            "weights": self._over_ranks(coefficients.weights),
            "losses": self._over_ranks(coefficients.losses),
            "task_dots": [[self._dot(left, right) for right in self._task] for left in self._task],
            "forwards": self.num_forwards,
            "backwards": self.num_backwards,
        }

    def _keep(self, parts: dict[str, Gradient]) -> None:
        """A bucket's part of each term."""
        self._summarize(parts)
        self._task.append(parts["task"])
        for term, part in parts.items():
            self.whole[term] = add_up(self.whole.get(term), part)

    def _summarize(self, parts: dict[str, Gradient]) -> None:
        """Note the norms of the terms' gradients and their inner products."""
        self._norms.append({term: self.space.norm(part) for term, part in parts.items()})
        self._dots.append({f"{a}_{b}": self._dot(parts[a], parts[b]) for a, b in combinations(self.actor.terms, 2)})

    def _dot(self, left: Gradient, right: Gradient) -> float:
        return float(self.space.dots(left, right).sum())

    def _over_ranks(self, values: torch.Tensor) -> list[list[float]]:
        return torch.tensor(self.ranks.sum(values.flatten().tolist()), dtype=torch.float64).view_as(values).tolist()
