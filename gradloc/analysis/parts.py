# SPDX-License-Identifier: Apache-2.0
"""Split one step's gradient on the ranks: by bucket of rows and term of the loss, or by quartile of the tokens.

The step is one that training recorded, or one of forwards alone that is never taken. Where the trainer can compute its
loss under other settings, the coefficients are split by term of the loss. A part is the gradient of the tokens that a
mask selects, so the parts add up to the whole gradient, whatever the loss and its average are.

There are two norms. A bucket's *part* of the gradient keeps the weight that its rows have in the whole batch. Its
*own* gradient is the part divided by the bucket's share of the average: what the gradient would be if the bucket were
the batch, comparable between buckets of any size. For the whole they are the same.

A trial update runs the trainer's own clipping and optimizer; then weights, optimizer state and the options of its
parameter groups are restored bit for bit.

Shapes: B rows of a micro-batch, T response positions, K buckets, C terms of the loss, S sampled tokens.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ..core.forward_state import RngState
from ..core.gradients import Gradient, GradientSpace
from ..core.probe import Prober
from ..core.ranks import PeerFailure, Ranks
from ..core.sharding import local_shard
from ..core.step import LossReplay, Outputs, Recorded
from ..record.analysis import Update
from ..search.weights import MovedWeights
from .buckets import BucketNumbers
from .quartiles import NUM_QUARTILES, UPDATES, QuartileNumbers

logger = logging.getLogger(__name__)

BUCKET_KEY = "gradloc_bucket"
"""Key of each row's bucket, int (R,); -1 in rows that only fill up the ranks."""
QUARTILE_KEY = "gradloc_quartile"
"""Key of each token's quartile, int (R, T); -1 where there is no response token and in rows that only fill up ranks."""
SAMPLE_KEY = "gradloc_sample"
"""Key of the number of each sampled token, from 0 on, int (R, T); -1 for all others."""
NUM_BUCKETS_KEY, NUM_SAMPLED_KEY = "gradloc_num_buckets", "gradloc_num_sampled"
"""Keys of the request: the number of buckets, or of sampled tokens; the key says which analysis is asked for."""


@dataclass
class Analysed:
    """A step, and the parts of its trainer that a trial update needs."""

    step: Any
    """A :class:`~..core.step.TrainingStep`."""
    labels: Callable[[str, int], torch.Tensor]
    """(key, micro-batch) -> that micro-batch's rows of the tensor under one of the keys above."""
    space: GradientSpace
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    clip: Callable[[], torch.Tensor]
    """Clip ``.grad`` as training does; returns the norm before, a scalar."""
    clip_limit: float


def measure(make: Callable[[], Analysed], space: GradientSpace, request: Mapping[str, Any]) -> dict[str, Any]:
    """Split a step's gradient; the model and its optimizer are left as they were, bit for bit.

    Args:
        make: returns the step; it may run the step's forwards.
        space: the model's parameters.
        request: ``NUM_BUCKETS_KEY`` or ``NUM_SAMPLED_KEY``.

    Returns:
        Numbers that are the same on every rank but for the log-probs; ``{"error": sentence}`` if a rank failed between
        collectives.

    Raises:
        Exception: whatever a forward or backward raised. Peers wait in its collective, so the run cannot go on.
    """
    start = time.perf_counter()
    try:
        with _undisturbed(space):
            parts = Parts(make())
            if NUM_SAMPLED_KEY in request:
                numbers: Any = parts.by_quartile(request[NUM_SAMPLED_KEY])
            else:
                numbers = parts.by_bucket(request[NUM_BUCKETS_KEY])
    except PeerFailure as error:
        logger.exception("gradloc: the gradient analysis failed; training goes on")
        return {"error": str(error)}
    except Exception:
        logger.exception("gradloc: the gradient analysis failed inside the model; other ranks wait for this one")
        raise
    return {**numbers, "seconds": time.perf_counter() - start}


@contextmanager
def _undisturbed(space: GradientSpace) -> Iterator[None]:
    """Restore what an analysis changes: gradients, the state that forwards move, train or eval mode."""
    state, gradient, kept = space.forward_state(), space.take(), space.keeps_on_host
    modes = [(module, module.training) for module in space.module.modules()]
    space.keeps_on_host = True
    try:
        yield
    finally:
        space.keeps_on_host = kept
        space.put(gradient)
        state.restore()
        for module, is_training in modes:
            module.training = is_training


class Parts:
    """Splits one step's gradient; all ranks call every method together. Gradients are kept in the host's memory."""

    def __init__(self, analysed: Analysed):
        self.analysed, self.ranks, self.space = analysed, analysed.ranks, analysed.space
        self.prober = Prober(analysed.step, self.space, self.ranks)
        self.step, self.micro_batches = self.prober.step, range(analysed.step.num_micro_batches)
        self.terms = self.ranks.run_local_synced(partial(records_by_term, analysed.step))
        if isinstance(analysed.step, LossReplay) and all(each.log_prob_coefficient is None for each in self._recorded):
            self.ranks.run_local_synced(partial(record_by_loss, analysed.step))
        self.masks = [self.step.token_mask(index) for index in self.micro_batches]
        self.whole: dict[str, Gradient] = {}
        """Gradient of each term, as the sum of its parts."""
        has_auxiliary = any(record.auxiliary_coefficient is not None for record in self._recorded)
        self._auxiliary: Gradient | None = None
        """Gradient of the auxiliary loss, which every pass adds whatever tokens are selected."""
        if not self.ranks.all(not has_auxiliary):
            self._auxiliary = self.gradient(self._recorded, [torch.zeros_like(mask) for mask in self.masks])

    @property
    def _recorded(self) -> list[Recorded]:
        return [self.analysed.step.recorded(index) for index in self.micro_batches]

    def gradient(self, records: Sequence[Recorded], selected: Sequence[torch.Tensor]) -> Gradient:
        """Return the gradient of the selected tokens, bool (B, T) of each micro-batch, without the auxiliary loss."""
        self.prober.compute_part(records, selected)
        return self._keep()

    def _keep(self) -> Gradient:
        if self._auxiliary is not None:
            self.prober.add(self._auxiliary, -1.0)
        return self.space.keep()

    def labels(self, name: str) -> list[torch.Tensor]:
        """Return the labels of each micro-batch, int (B,) or (B, T)."""
        labels = self.analysed.labels
        return self.ranks.run_local_synced(lambda: [labels(name, index).cpu() for index in self.micro_batches])

    # ---- by bucket and term

    def by_bucket(self, num_buckets: int) -> BucketNumbers:
        """Measure the buckets. One gradient per bucket and two per term are kept in the host's memory."""
        labels = self.labels(BUCKET_KEY)
        bucket_masks = [self._masks_where(labels, bucket) for bucket in range(num_buckets)]
        weights, losses = self._weights_and_losses(bucket_masks)
        tasks: list[Gradient] = []
        norms: list[dict[str, float]] = []
        dots: list[dict[str, float]] = []
        for masks in bucket_masks:
            parts = {term: self.gradient(records, masks) for term, records in self.terms.items()}
            norms.append(self._norms(parts))
            dots.append(self._dots(parts))
            tasks.append(parts["task"])
            self.whole = {term: add_up(self.whole.get(term), part) for term, part in parts.items()}
        norms.append(self._norms(self.whole))
        dots.append(self._dots(self.whole))
        return {
            "terms": list(self.terms),
            "norms": norms,
            "dots": dots,
            "weights": weights.tolist(),
            "losses": None if np.isnan(losses).any() else losses.tolist(),
            "task_dots": [[self._dot(left, right) for right in tasks] for left in tasks],
            "forwards": self.prober.num_forwards,
            "backwards": self.prober.num_backwards,
        }

    def _masks_where(self, labels: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        """Return which response tokens have this label, bool (B, T) of each micro-batch."""
        pairs = zip(self.masks, labels, strict=True)
        return [mask & (label == number).view(len(mask), -1) for mask, label in pairs]

    def _weights_and_losses(self, bucket_masks: list[list[torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
        """Return each bucket's share of each term's average, and of its value, NaN if it is not known: (K, C) each."""
        local = self.ranks.run_local_synced(lambda: [self._local_averages(masks) for masks in bucket_masks])
        shape = len(bucket_masks), 2, len(self.terms)
        averages = np.reshape(self.ranks.sum(np.ravel(local).tolist()), shape)
        weights, losses = averages[:, 0], averages[:, 1]
        if not hasattr(self.analysed.step, "average"):  # weights in any unit
            weights = weights / np.where(weights.sum(0) == 0, 1.0, weights.sum(0))
        return weights, losses

    def _local_averages(self, masks: list[torch.Tensor]) -> list[list[float]]:
        """Return this rank's part of a bucket's share of each term's average, and of the term's value: (2, C)."""
        found = torch.zeros(2, len(self.terms), dtype=torch.float64)
        for index, mask in enumerate(masks):
            if not mask.any():
                continue
            for column, term in enumerate(self.terms):
                found[:, column] += torch.tensor(self._average(index, term, mask), dtype=torch.float64)
        return found.tolist()

    def _average(self, index: int, term: str, mask: torch.Tensor) -> tuple[float, float]:
        """Return the selected tokens' share of a term's average, and of its value; NaN if the step does not know it."""
        average = getattr(self.analysed.step, "average", None)
        if average is not None:
            return average(index, term, mask.to(self.space.device))
        weights = self.step.details(index).weights
        return float(mask.sum() if weights is None else weights.float()[mask].sum()), math.nan

    def _norms(self, parts: dict[str, Gradient]) -> dict[str, float]:
        return {term: self.space.norm(part) for term, part in parts.items()}

    def _dots(self, parts: dict[str, Gradient]) -> dict[str, float]:
        return {f"{a}_{b}": self._dot(parts[a], parts[b]) for a, b in combinations(parts, 2)}

    def _dot(self, left: Gradient, right: Gradient) -> float:
        return float(self.space.dots(left, right).sum())

    # ---- by quartile

    def by_quartile(self, num_sampled: int) -> QuartileNumbers:
        """Measure the quartiles, with S tokens sampled over all ranks. Six gradients are kept in the host's memory."""
        step, space, optimizer = self.step, self.space, self.analysed.optimizer
        whole = self._whole()
        quartiles, samples = self.labels(QUARTILE_KEY), self.labels(SAMPLE_KEY)
        parts = [self.gradient(self._recorded, self._masks_where(quartiles, index)) for index in range(NUM_QUARTILES)]
        tokens = [self._token(self._masks_where(samples, index)) for index in range(num_sampled)]
        space.module.eval()
        updates: dict[str, Update | None] = {}
        log_probs: dict[str, Any] = {"before": self._log_probs()}
        norms = [space.norm(part) for part in parts]
        for name, chosen in UPDATES.items():
            if len(chosen) == 1 and norms[chosen[0]] == 0:  # a quartile without tokens has no gradient to try
                updates[name] = log_probs[name] = None
                continue
            gradient = parts[chosen[0]] if len(chosen) == 1 else whole if chosen else zeros_like(whole)
            updates[name], log_probs[name] = self._try(gradient)
        norm = space.norm(whole)
        return {
            "terms": list(self.terms),
            "whole": norm,
            "norms": norms,
            "dots": [self._dot(part, whole) for part in parts],
            "closure": self._distance(parts, whole) / norm if norm != 0 else None,
            "tokens": tokens,
            "steps": updates,
            "optimizer": type(optimizer).__name__,
            "learning_rate": max(float(group["lr"]) for group in optimizer.param_groups),
            "log_probs": log_probs,
            "rows": [row for index in self.micro_batches for row in step.rows(index)],
            "forwards": self.prober.num_forwards,
            "backwards": self.prober.num_backwards,
        }

    def _whole(self) -> Gradient:
        """Return the whole gradient, from a pass of its own in training's order."""
        self.prober.compute(enumerate(self.masks))
        return self._keep()

    def _distance(self, parts: Sequence[Gradient], whole: Gradient) -> float:
        """Return the norm of the difference between the sum of the parts and the whole."""
        self.space.put(clone(whole))
        for part in parts:
            self.space.add(part, -1.0)
        return self.space.norm()

    def _token(self, selected: list[torch.Tensor]) -> dict[str, float | None]:
        """Return the norms of one token's own gradients.

        Returns:
            ``log_prob_norm``: of its log-prob, None where it is not known; ``loss_norm``: of its part of the gradient.
        """
        records = self._recorded
        coefficient, has_entropy = self._coefficient(selected)
        if all(isinstance(record.pull(None), Outputs) for record in records):  # a backward may begin at log-probs
            log_probs_alone = [_plain_log_prob(record, 1.0 / self.step.weight) for record in records]
            log_prob_norm = self.space.norm(self.gradient(log_probs_alone, selected))
            if has_entropy:
                loss_norm = self.space.norm(self.gradient(records, selected))
            else:
                loss_norm = abs(coefficient) * log_prob_norm
            return {"log_prob_norm": log_prob_norm, "loss_norm": loss_norm}
        loss_norm = self.space.norm(self.gradient(records, selected))
        is_known = not has_entropy and coefficient != 0
        return {"log_prob_norm": loss_norm / abs(coefficient) if is_known else None, "loss_norm": loss_norm}

    def _coefficient(self, selected: list[torch.Tensor]) -> tuple[float, bool]:
        """Return d loss / d log_prob of one token, and whether its entropy is part of the loss, from its rank."""
        coefficient, has_entropy = 0.0, False
        for index, mask in enumerate(selected):
            if mask.any():
                by_log_prob, by_entropy = self.step.coefficients(index)
                coefficient += by_log_prob[mask].sum().item()
                has_entropy = has_entropy or by_entropy is not None
        coefficient, num_entropies = self.ranks.sum([coefficient, float(has_entropy)])
        return coefficient, num_entropies > 0

    def _try(self, gradient: Gradient) -> tuple[Update, list[np.ndarray] | None]:
        """Update with this gradient, read every token's log-prob, and take the update back."""
        with trial_update(self.analysed, gradient) as update:
            return update, self._log_probs() if update.is_taken else None

    def _log_probs(self) -> list[np.ndarray]:
        """Return log-probs at the present weights, float32 (B, T) of each micro-batch, 0 outside of responses."""
        pairs = [(self.prober.forward(index).log_prob, mask) for index, mask in enumerate(self.masks)]
        return [np.where(mask, values.float(), 0.0) for values, mask in pairs]


def records_by_term(step: Any) -> dict[str, list[Recorded]]:
    """Return each micro-batch's coefficients by term of the loss: ``task``, and ``entropy`` and ``kl`` if they are on.

    All is ``task`` where the step cannot compute its loss anew. Runs no forward.
    """
    indices = range(step.num_micro_batches)
    if not isinstance(step, LossReplay):
        return {"task": [step.recorded(index) for index in indices]}
    found: dict[str, list[Recorded]] = {term: [] for term in terms_of(step)}
    for index in indices:
        task = torch.tensor(0.0)
        for term, settings in terms_of(step).items():  # the task is first; each other record has it, too
            record = _recorded_under(step, index, settings)
            if term == "entropy":
                record.log_prob_coefficient = torch.zeros_like(record.log_prob)
            else:
                with_task = record.log_prob_coefficient
                record.log_prob_coefficient, record.entropy_coefficient = with_task - task.to(with_task.device), None
                task = with_task if term == "task" else task
            found[term].append(record)
    return found


def record_by_loss(step: Any) -> None:
    """Give a step that had no backward the coefficients that one of its own loss would leave."""
    for index in range(step.num_micro_batches):
        found, record = _recorded_under(step, index, {}), step.recorded(index)
        record.log_prob_coefficient, record.entropy_coefficient = found.log_prob_coefficient, found.entropy_coefficient


def _recorded_under(step: Any, index: int, settings: Mapping[str, Any]) -> Recorded:
    """Return :meth:`~..core.step.LossReplay.recorded_under`, with the same random numbers for each loss that draws."""
    rng = RngState(step.recorded(index).log_prob.device)
    try:
        return step.recorded_under(index, settings)
    finally:
        rng.restore()


def terms_of(step: LossReplay) -> dict[str, Mapping[str, Any]]:
    """Return settings under which the loss is the task alone, and for each other term the task and the term."""
    no_entropy, no_kl = step.without_entropy, step.without_kl
    terms = {"task": {**(no_entropy or {}), **(no_kl or {})}}
    if no_entropy is not None:
        terms["entropy"] = no_kl or {}
    if no_kl is not None:
        terms["kl"] = no_entropy or {}
    return terms


def _plain_log_prob(record: Recorded, coefficient: float) -> Recorded:
    """Return the record of a loss that is a sum of log-probs."""
    found = copy.copy(record)
    found.log_prob_coefficient = torch.full_like(record.log_prob, coefficient, dtype=torch.float32)
    found.entropy_coefficient = None
    return found


@contextmanager
def trial_update(analysed: Analysed, gradient: Gradient) -> Iterator[Update]:
    """Take a step with this gradient inside the context, unless its norm is not finite, and undo it at the end.

    Stabilizers are left out, for they would learn from the step.

    Args:
        analysed: has the optimizer and the clipping; ``.grad`` is left empty.
        gradient: local shards in host memory; a parameter without one is not updated.
    """
    space = analysed.space
    with MovedWeights(space, torch.float32) as weights, kept_optimizer(analysed.optimizer):
        space.put(clone(gradient))  # clipped in place
        norm = float(analysed.clip().detach())
        is_taken, clip_factor = math.isfinite(norm), 1.0
        if is_taken:
            analysed.optimizer.step()
            clip_factor = min(1.0, analysed.clip_limit / (norm + 1e-6))
        space.clear()
        space.reshard()
        yield Update(is_taken=is_taken, grad_norm=norm, clip_factor=clip_factor, update_norm=weights.distance())


@contextmanager
def kept_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore an optimizer's state and options bit for bit; offloaded state is on the device meanwhile."""
    options = [dict(group) for group in optimizer.param_groups]
    entries = {param: dict(state) for param, state in optimizer.state.items()}
    saved = []
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.dim() > 0 and value.device != param.device:
                state[key] = value.to(param.device)  # the step changes this copy
            else:
                saved.append((value, local_shard(value).to("cpu", copy=True)))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, copied in saved:
                local_shard(value).copy_(copied)
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(entries)


def clone(gradient: Gradient) -> Gradient:
    return [None if grad is None else grad.clone() for grad in gradient]


def zeros_like(gradient: Gradient) -> Gradient:
    return [None if grad is None else torch.zeros_like(grad) for grad in gradient]


def add_up(total: Gradient | None, part: Gradient) -> Gradient:
    """Add a part to a running total, in place; the first part is copied."""
    if total is None:
        return clone(part)
    for index, grad in enumerate(part):
        if grad is not None:
            total[index] = grad.clone() if total[index] is None else total[index].add_(grad)
    return total
