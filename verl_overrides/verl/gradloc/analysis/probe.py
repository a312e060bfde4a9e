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
from typing import Any, Optional

import torch

from verl.utils.device import get_device_id

from ..gradients import Gradient, GradientSpace, local_shard
from ..probe import RngState
from ..ranks import PeerFailure, Ranks
from .coefficients import BUCKET_KEY, Frozen, forward, freeze, terms_of

__all__ = ["NUM_BUCKETS_KEY", "RECORD_KEY", "ComponentProbe", "analyze"]

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

NUM_BUCKETS_KEY = "gradloc_num_buckets"
RECORD_KEY = "gradloc_analysis"


def analyze(actor: Any, data: Any) -> dict[str, Any]:
    """Split the gradient of a batch by term and bucket; the actor is left as it was, bit for bit.

    Args:
        actor: verl's ``DataParallelPPOActor``.
        data: this rank's rows, as many as every other rank has, with ``BUCKET_KEY``; meta info ``temperature`` and
            ``NUM_BUCKETS_KEY``.

    Returns:
        The same plain numbers on every rank, see :meth:`ComponentProbe.record`; ``{"error": sentence}`` when a rank
        failed where all could be told.

    Raises:
        Exception: whatever a forward or backward raised. Peers wait in its collective, so the run cannot go on.
    """
    device = get_device_id() if actor.device_name != "cpu" else "cpu"
    ranks = Ranks(device=device, replicas=actor.ulysses_sequence_parallel_size)
    space = GradientSpace(actor.actor_module)
    start = time.perf_counter()
    try:
        with _undisturbed(actor, space):
            probe = ComponentProbe(actor, ranks, space)
            probe.measure(data)
    except PeerFailure as error:
        logger.exception("gradloc: the gradient analysis failed; training goes on")
        return {"error": str(error)}
    except Exception:
        logger.exception("gradloc: the gradient analysis failed inside the model; other ranks wait for this one")
        raise
    return {**probe.record(), "seconds": time.perf_counter() - start}


@contextmanager
def _undisturbed(actor: Any, space: GradientSpace) -> Iterator[None]:
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


class ComponentProbe:
    """One analysis on one rank; every rank makes the same calls in the same order.

    Gradients that have to be kept, one per bucket and two per term, wait in host memory.

    Args:
        actor: verl's actor.
        ranks: the data-parallel ranks.
        space: the actor's parameters; ``.grad`` is scratch space.
    """

    def __init__(self, actor: Any, ranks: Ranks, space: GradientSpace):
        self.actor, self.ranks, self.space = actor, ranks, space
        self.terms = terms_of(actor.config)
        self.whole: dict[str, Gradient] = {}
        """Per term, the whole batch's gradient: the sum over the buckets."""
        self.norms: list[dict[str, float]] = []
        self.dots: list[dict[str, float]] = []
        self.num_forwards = self.num_backwards = 0
        self._task: list[Gradient] = []
        self._frozen: Optional[Frozen] = None

    def measure(self, data: Any) -> None:
        """Fill in everything that :meth:`record` reports."""
        self._data, self._temperature = data, data.meta_info["temperature"]
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
                parts[term] = self._gradient(term, plan[key], num_chunks)
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
        lengths = self._data.batch["attention_mask"].sum(-1)
        plan = {}
        for term in self.terms:
            counts = (self._frozen.coefficients[term] != 0).any(-1).cpu()  # NaN counts
            for bucket in range(num_buckets):
                rows = ((buckets == bucket) & counts).nonzero().flatten()
                rows = rows[lengths[rows].argsort(descending=True, stable=True)]
                plan[bucket, term] = self._chunks(rows.tolist(), lengths)
        self._filler = int(lengths.argmin())
        return plan

    def _chunks(self, rows: list[int], lengths: torch.Tensor) -> list[list[int]]:
        """Cut rows into runs that fit where training's micro-batches fit."""
        config = self.actor.config
        if not config.use_dynamic_bsz:
            size = config.ppo_micro_batch_size_per_gpu
            return [rows[start : start + size] for start in range(0, len(rows), size)]
        budget = config.ppo_max_token_len_per_gpu * self.actor.ulysses_sequence_parallel_size
        chunks, room = [], 0
        for row in rows:
            length = int(lengths[row])
            if not chunks or length > room:
                chunks.append([])
                room = budget
            chunks[-1].append(row)
            room -= length
        return chunks

    def _gradient(self, term: str, chunks: list[list[int]], num_chunks: int) -> Gradient:
        """The additive part of some rows in one term's gradient, moved to host memory."""
        self.space.clear()
        for index in range(num_chunks):
            self._backward(term, chunks[index] if index < len(chunks) else None)
        scale = self._loss_scale
        if scale != 1.0:
            self.space.scale(1.0 / scale)
        return [None if grad is None else local_shard(grad).cpu() for grad in self.space.take()]

    def _backward(self, term: str, rows: Optional[list[int]]) -> None:
        self.num_forwards += 1
        self.num_backwards += 1
        chosen = [self._filler] if rows is None else rows
        inputs = {**self._data.select_idxs(chosen).to(get_device_id()).batch}
        is_entropy = term == "entropy"
        entropy, log_prob = self.actor._forward_micro_batch(
            inputs, temperature=self._temperature, calculate_entropy=is_entropy
        )
        values = entropy if is_entropy else log_prob
        coefficients = self._frozen.coefficients[term][chosen]
        if rows is None:
            coefficients = torch.zeros_like(coefficients)
        ((values * coefficients).sum() * self._loss_scale).backward()

    @property
    def _loss_scale(self) -> float:
        """The fp16 scaler's factor, which keeps small gradients from vanishing; taken out again afterwards."""
        return 1.0 if self.actor.scaler is None else self.actor.scaler.get_scale()

    def _keep(self, parts: dict[str, Gradient]) -> None:
        self._summarize(parts)
        self._task.append(parts["task"])
        for term, part in parts.items():
            self.whole[term] = _sum(self.whole.get(term), part)

    def _summarize(self, parts: dict[str, Gradient]) -> None:
        """Note the norms of the terms' gradients and their inner products."""
        self.norms.append({term: self.space.norm(part) for term, part in parts.items()})
        pairs = [(a, b) for index, a in enumerate(self.terms) for b in self.terms[index + 1 :]]
        self.dots.append({f"{a}_{b}": self._dot(parts[a], parts[b]) for a, b in pairs})

    def _dot(self, left: Gradient, right: Gradient) -> float:
        return float(self.space.dots(left, right).sum())


def _sum(total: Optional[Gradient], part: Gradient) -> Gradient:
    """Add a part to a running total, in place; the first part is copied."""
    if total is None:
        return [None if grad is None else grad.clone() for grad in part]
    for index, grad in enumerate(part):
        if grad is None:
            continue
        if total[index] is None:
            total[index] = grad.clone()
        else:
            total[index].add_(grad)
    return total
