# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""What the workers do: the gradient of each term of the loss over each bucket, with nothing left changed.

The rows of a bucket are run together, whatever micro-batches they came from, so one analysis costs one forward and
about one pass per term (forward and backward), however many buckets there are. Ranks hold unequal parts of a bucket:
one that has run out of rows runs a row with zero weight, because its peers' collectives wait for it.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.utils.device import get_device_id

from ...core.gradients import Gradient, GradientSpace
from ...core.probe import RngState
from ...core.ranks import PeerFailure, Ranks
from ..coefficients import BUCKET_KEY, Frozen, forward, freeze, terms_of
from ..quartiles.probe import QUARTILE_KEY, QuartileProbe
from ..rows import RowProbe, Weights, add_up

__all__ = ["NUM_BUCKETS_KEY", "RECORD_KEY", "ComponentProbe", "analyze", "undisturbed"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

NUM_BUCKETS_KEY = "gradloc_num_buckets"
RECORD_KEY = "gradloc_analysis"


def analyze(actor: Any, data: Any) -> dict[str, Any]:
    """Split the gradient of a batch; the actor is left as it was, bit for bit.

    Args:
        actor: verl's ``DataParallelPPOActor``.
        data: this rank's rows, as many as every other rank has, with ``BUCKET_KEY``; meta info ``temperature``. With
            ``QUARTILE_KEY`` it is split by probability quartile, else by term and bucket.

    Returns:
        Plain numbers, see :meth:`ComponentProbe.record` and :meth:`QuartileProbe.record`; ``{"error": sentence}`` when
        a rank failed where all could be told.

    Raises:
        Exception: whatever a forward or backward raised. Peers wait in its collective, so the run cannot go on.
    """
    device = get_device_id() if actor.device_name != "cpu" else "cpu"
    ranks = Ranks(device=device, replicas=actor.ulysses_sequence_parallel_size)
    space = GradientSpace(actor.actor_module)
    start = time.perf_counter()
    try:
        with undisturbed(actor, space):
            is_by_quartile = QUARTILE_KEY in data.batch.keys()
            probe = (QuartileProbe if is_by_quartile else ComponentProbe)(actor, ranks, space)
            probe.measure(data)
    except PeerFailure as error:
        logger.exception("gradloc: the gradient analysis failed; training goes on")
        return {"error": str(error)}
    except Exception:
        logger.exception("gradloc: the gradient analysis failed inside the model; other ranks wait for this one")
        raise
    return {**probe.record(), "seconds": time.perf_counter() - start}


@contextmanager
def undisturbed(actor: Any, space: GradientSpace) -> Iterator[None]:
    """Put back what an analysis touches: gradients, random state, train or eval mode, the accumulation count."""
    rng, gradient = RngState(torch.device(actor.device_name)), space.take()
    was_training = actor.actor_module.training
    accumulation = actor.__dict__.get("gradient_accumulation")
    actor.gradient_accumulation = 1
    actor.actor_module.train()
    try:
        yield
    finally:
        space.put(gradient)
        rng.restore()
        actor.actor_module.train(was_training)
        del actor.gradient_accumulation
        if accumulation is not None:
            actor.gradient_accumulation = accumulation


class ComponentProbe(RowProbe):
    """One analysis on one rank; every rank makes the same calls in the same order.

    Gradients that have to be kept, one per bucket and two per term, wait in host memory.

    Args:
        actor: verl's actor.
        ranks: the data-parallel ranks.
        space: the actor's parameters; ``.grad`` is scratch space.
    """

    def __init__(self, actor: Any, ranks: Ranks, space: GradientSpace):
        super().__init__(actor, ranks, space)
        self.terms = terms_of(actor.config)
        self.whole: dict[str, Gradient] = {}
        """Per term, the whole batch's gradient: the sum over the buckets."""
        self.norms: list[dict[str, float]] = []
        self.dots: list[dict[str, float]] = []
        self._task: list[Gradient] = []
        self._frozen: Frozen | None = None

    def measure(self, data: Any) -> None:
        """Fill in everything that :meth:`record` reports."""
        self._hold(data)
        num_buckets = data.meta_info[NUM_BUCKETS_KEY]
        forwarded = forward(self.actor, data, self._temperature)
        self.num_forwards += len(forwarded)
        buckets = data.batch[BUCKET_KEY]
        num_rows = int(self.ranks.sum([float((buckets >= 0).sum())])[0])
        self._frozen = self.ranks.agree(
            lambda: freeze(self.actor, forwarded, len(data), num_buckets, num_rows, self.ranks.size)
        )
        plan = self.ranks.agree(lambda: self._plan(buckets, num_buckets))
        lengths = {key: len(chunks) for key, chunks in plan.items()}
        everyone = self.ranks.gather(lengths)
        for bucket in range(num_buckets):
            parts = {}
            for term in self.terms:
                key = (bucket, term)
                num_chunks = max(lengths[key] for lengths in everyone)
                parts[term] = self._gradient(self._weights(term), plan[key], num_chunks)
            self._keep(parts)
        self._summarize(self.whole)

    def record(self) -> dict[str, Any]:
        """Plain numbers, the same on every rank.

        Returns:
            ``terms``; ``norms`` and ``dots`` (inner products of two terms), one entry per bucket and a last one for
            the whole batch, all of the additive parts; ``weights`` and ``losses`` (bucket x term); ``task_dots``
            (bucket x bucket); ``forwards`` and ``backwards`` on each rank.
        """
        shape = self._frozen.weights.shape
        numbers = torch.cat([self._frozen.weights.flatten(), self._frozen.losses.flatten()])
        weights, losses = torch.tensor(self.ranks.sum(numbers.tolist()), dtype=torch.float64).view(2, *shape)
        return {
            "terms": list(self.terms),
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
        for term in self.terms:
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
        pairs = [(a, b) for index, a in enumerate(self.terms) for b in self.terms[index + 1 :]]
        self.dots.append({f"{a}_{b}": self._dot(parts[a], parts[b]) for a, b in pairs})

    def _dot(self, left: Gradient, right: Gradient) -> float:
        return float(self.space.dots(left, right).sum())
