# SPDX-License-Identifier: Apache-2.0
"""The gradient by term of the loss and by bucket of reward deviation, as RAGEN splits it.

An analysis costs one forward and about one pass (forward and backward) per term, however many buckets there are. What
the guide calls reward variance is the standard deviation of a group's rewards, here as there.

The batch is cut into the very micro-batches that training would cut, so that each token keeps the weight it has there,
and training's own loss is differentiated by the log-probs and entropies. With these coefficients the gradient of any
rows' part of any term is the backward of a plain weighted sum, and the parts add up to the training gradient whatever
the loss and its aggregation are.

Two norms are told apart. A bucket's *part* of the gradient keeps the weight that its rows have in the whole batch, so
the parts add up to ``all``. Its *own* gradient is the part divided by the bucket's share of the average: what the
gradient would be if the bucket were the batch, comparable between buckets of any size. For ``all`` they are the same.

Shapes: R rows on this rank, T response positions, K buckets, C terms of the loss, G groups.
"""

import math
from functools import partial
from itertools import combinations
from typing import TypedDict

import numpy as np
import torch

from ..core.gradients import Gradient
from ..record.analysis import Bucket, GradientAnalysis, Group, Norms, Range
from ..rollout_filter.groups import GroupStatistics
from .actor import BUCKET_KEY, Actor, ActorMicroBatch, RowProbe, Rows, Weights, add_up, only

ALL = "all"
NUM_FIXED = 6
"""Intervals of ``fixed_rv``: [0, 1), [1, 2), ... and [5, infinity)."""


def split_groups(reward_std: np.ndarray, mode: str, num_buckets: int) -> dict[str, list[int]]:
    """Deal the groups into buckets.

    Args:
        reward_std: (G,), at least 0; NaN (a reward that is not finite) counts as the largest.
        mode: ``quantile``: groups in order of their deviation, cut into ``num_buckets`` runs whose sizes differ by
            at most one, or one run per group where there are fewer groups; ties keep their order in the batch.
            ``fixed_rv``: intervals of width 1, ``num_buckets`` unused.
        num_buckets: at least 1.

    Returns:
        ``bucket_1`` (lowest deviation) and on -> its groups in ascending order of deviation. Buckets without a group
        are left out, so a name always means the same interval under ``fixed_rv``; no group gives no bucket.

    Example:
        >>> split_groups(np.array([0.5, 0.0, 0.2]), "quantile", 2)
        {'bucket_1': [1, 2], 'bucket_2': [0]}
    """
    order = np.argsort(reward_std, kind="stable")  # NaN sorts last
    if mode == "quantile":
        runs = np.array_split(order, min(num_buckets, max(len(order), 1)))
    else:
        interval = np.minimum(np.nan_to_num(np.floor(reward_std), nan=NUM_FIXED - 1), NUM_FIXED - 1)
        runs = [order[interval[order] == number] for number in range(NUM_FIXED)]
    return {f"bucket_{number}": run.tolist() for number, run in enumerate(runs, start=1) if len(run)}


class BucketCoefficients:
    """Of this rank's rows, gathered micro-batch by micro-batch.

    Args:
        actor: supplies the loss.
        rows: this rank's.
        num_buckets: K.
        num_rows: rows of the whole batch, without filling ones.
        dp_size: ranks that the gradient is averaged over.
    """

    def __init__(self, actor: Actor, rows: Rows, num_buckets: int, num_rows: int, dp_size: int):
        self._actor, self._num_rows, self._dp_size = actor, num_rows, dp_size
        shape = rows["response_mask"].shape
        self._coefficients = {term: torch.zeros(shape, device=actor.device) for term in actor.terms}
        """Per term, (R, T): d (whole batch's loss) / d log_prob, or d entropy for its term, times ``dp_size``."""
        self.weights = torch.zeros(num_buckets, len(actor.terms), dtype=torch.float64)
        """(K, C): the buckets' shares of the terms' averages; over all ranks they sum to 1 for each term."""
        self.losses = torch.zeros_like(self.weights)
        """(K, C): the buckets' parts of the terms' values; over all ranks they sum to the batch's loss."""

    def of(self, term: str) -> Weights:
        """The weights whose sum has the term's gradient."""
        return {"entropy" if term == "entropy" else "log_prob": self._coefficients[term]}

    def add(self, part: ActorMicroBatch, log_prob: torch.Tensor, entropy: torch.Tensor | None) -> None:
        """Differentiate a micro-batch's loss by its log-probs and entropies; no model runs, no rank waits for another.

        It counts as where the mini-batch is the batch: a last, smaller mini-batch or micro-batch is not scaled as if
        it were full.
        """
        if not len(part.rows):
            return
        actor = self._actor
        shares = {term: actor.share(part, term, self._num_rows) for term in actor.terms}
        leaf = log_prob.clone().requires_grad_()
        entropy_leaf = None if entropy is None else entropy.clone().requires_grad_()
        by_term = actor.loss_terms(part.inputs, leaf, entropy_leaf, part.on_policy)
        for term, share in shares.items():
            by = entropy_leaf if term == "entropy" else leaf
            (grad,) = torch.autograd.grad(by_term[term], by, retain_graph=True)
            self._coefficients[term][part.rows] = (grad * (share * self._dp_size)).float()
        buckets, tokens = part.inputs[BUCKET_KEY], part.inputs["response_mask"].sum(-1).double()
        for bucket in buckets.unique().tolist():
            inside = buckets == bucket
            values = by_term
            if not inside.all():
                inputs = {key: value[inside] for key, value in part.inputs.items()}
                with torch.no_grad():
                    inner = None if entropy is None else entropy[inside]
                    values = actor.loss_terms(inputs, log_prob[inside], inner, part.on_policy)
            by_tokens = float(tokens[inside].sum() / tokens.sum().clamp(min=1))
            by_rows = float(inside.double().mean())
            for index, (term, share) in enumerate(shares.items()):
                mode = actor.aggregation(term)
                weight = share * (by_tokens if mode == "token-mean" else by_rows)
                self.weights[bucket, index] += weight
                # this mode divides by a constant, so a sum over fewer rows is the rows' part already
                factor = share if mode == "seq-mean-token-sum-norm" else weight
                self.losses[bucket, index] += values[term].item() * factor


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


# ---- from the workers' numbers to the record, and to the guide's metric names


def bucket_records(
    numbers: BucketNumbers, buckets: dict[str, list[int]], groups: GroupStatistics, tokens: np.ndarray
) -> tuple[Bucket, ...]:
    """One record per bucket (name -> groups) in order, then ``all``; ``tokens``: (R,) response tokens of each row."""
    named = {**buckets, ALL: list(range(len(groups)))}
    return tuple(
        _bucket(numbers, index, name, members, groups, tokens) for index, (name, members) in enumerate(named.items())
    )


def _bucket(
    numbers: BucketNumbers, index: int, name: str, members: list[int], groups: GroupStatistics, tokens: np.ndarray
) -> Bucket:
    is_all, terms = name == ALL, numbers["terms"]
    is_member = np.isin(groups.group_of_row, members)
    num_rows, num_tokens = int(is_member.sum()), int(tokens[is_member].sum())
    std = groups.reward_std[members]
    norms, dots = numbers["norms"][index], numbers["dots"][index]
    weight = dict(zip(terms, [1.0] * len(terms) if is_all else numbers["weights"][index], strict=True))
    losses = np.sum(numbers["losses"], axis=0).tolist() if is_all else numbers["losses"][index]
    scale = {term: 1 / weight[term] if weight[term] else 0.0 for term in terms}  # 0: no row has a response token
    loss = {
        "policy" if term == "task" else term: value * scale[term] for term, value in zip(terms, losses, strict=True)
    }
    return Bucket(
        name=name,
        num_rows=num_rows,
        row_share=num_rows / len(tokens),
        num_tokens=num_tokens,
        num_groups=len(members),
        reward_std=Range(min=float(std.min()), mean=float(std.mean()), max=float(std.max())),
        weight=weight,
        norm={
            term: Norms(
                own=norms[term] * scale[term],
                part=norms[term],
                per_row=norms[term] / num_rows,
                per_token=norms[term] / num_tokens if num_tokens else None,
            )
            for term in terms
        },
        loss={**loss, "total": sum(loss.values())},
        cosine={pair: _cosine(dot, *(norms[term] for term in pair.split("_"))) for pair, dot in dots.items()},
    )


def _cosine(dot: float, left: float, right: float) -> float | None:
    """In [-1, 1]; None where a gradient is zero or not finite."""
    product = left * right
    if not math.isfinite(product) or product == 0.0 or not math.isfinite(dot):
        return None
    return max(-1.0, min(1.0, dot / product))


def bucket_cosines(numbers: BucketNumbers) -> tuple[tuple[float | None, ...], ...]:
    """Cosines between the buckets' task gradients (bucket x bucket); None where one is zero or not finite."""
    norms = [norms["task"] for norms in numbers["norms"][:-1]]
    return tuple(
        tuple(_cosine(dot, norms[row], norms[column]) for column, dot in enumerate(dots))
        for row, dots in enumerate(numbers["task_dots"])
    )


def group_table(buckets: dict[str, list[int]], groups: GroupStatistics) -> tuple[Group, ...]:
    """The guide's ``group_rv_table``: one line per group, in ascending order of deviation."""
    return tuple(
        Group(
            bucket=name,
            group_id=group,
            reward_std=float(groups.reward_std[group]),
            reward_mean=float(groups.reward_mean[group]),
            num_rows=int(groups.sizes[group]),
            uid=groups.uids[group],
        )
        for name, members in buckets.items()
        for group in members
    )


def analysis_metrics(record: GradientAnalysis) -> dict[str, float]:
    """The record's scalars under the guide's names, for any tracker; what a run lacks is left out."""
    metrics: dict[str, float | None] = {}
    for bucket in record.buckets:
        at = f"grad_norm/{bucket.name}"
        metrics[f"{at}/sample_count"] = bucket.num_rows
        metrics[f"{at}/sample_pct"] = bucket.row_share
        metrics[f"{at}/token_count"] = bucket.num_tokens
        metrics[f"{at}/group_rv_count"] = bucket.num_groups
        metrics.update({f"{at}/reward_std_{name}": value for name, value in vars(bucket.reward_std).items()})
        metrics[f"{at}/weight"] = bucket.weight["task"]
        for term, norm in bucket.norm.items():
            metrics[f"{at}/{term}"] = norm.own
            metrics[f"{at}/part/{term}"] = norm.part
            metrics[f"{at}/per_sample/{term}"] = norm.per_row
            metrics[f"{at}/per_token/{term}"] = norm.per_token
        metrics.update({f"{at}/loss/{name}": value for name, value in bucket.loss.items()})
        metrics.update({f"{at}/cosine/{pair}": value for pair, value in bucket.cosine.items()})
        if bucket.name == ALL:
            metrics.update({f"actor/loss/{name}": value for name, value in bucket.loss.items()})
            metrics.update({f"actor/grad_norm/{term}": norm.own for term, norm in bucket.norm.items()})
    names = [bucket.name for bucket in record.buckets if bucket.name != ALL]
    for row, cosines in enumerate(record.task_cosines):
        for column in range(row + 1, len(names)):
            metrics[f"grad_cosine/task/{names[row]}/{names[column]}"] = cosines[column]
    batch = record.batch
    metrics["grad_analysis/source_env_groups"] = batch.num_groups
    metrics["grad_analysis/source_batch_size"] = batch.num_rows
    metrics["grad_analysis/uses_training_batch"] = float(batch.source == "training")
    metrics["grad_analysis/zero_variance_share"] = batch.zero_variance_share
    metrics["grad_analysis/passes"] = record.cost.backwards
    return {name: float(value) for name, value in metrics.items() if value is not None}
