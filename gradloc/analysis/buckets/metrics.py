# SPDX-License-Identifier: Apache-2.0
"""From the workers' numbers to the analysis record and to the guide's metric names. Pure.

Two norms are told apart. A bucket's *part* of the gradient keeps the weight that its rows have in the whole batch, so
the parts add up to ``all``. Its *own* gradient is the part divided by the bucket's share of the average: what the
gradient would be if the bucket were the batch, comparable between buckets of any size. For ``all`` they are the same.
"""

import math

import numpy as np

from ...record.analysis import Bucket, GradientAnalysis, Group, Norms, Range
from ...rollout_filter.groups import GroupStatistics
from .probe import BucketNumbers

ALL = "all"


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
