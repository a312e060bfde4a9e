# SPDX-License-Identifier: Apache-2.0
"""The gradient by term of the loss and by bucket of reward deviation, as RAGEN splits it: which groups are in which
bucket, and from the ranks' numbers to the record and its metrics. Pure.

What the guide calls reward variance is the standard deviation of a group's rewards, here as there.

Shapes: R rows, K buckets, G groups.
"""

import math
from typing import TypedDict

import numpy as np

from ..record.analysis import Bucket, GradientAnalysis, Group, Norms, Range
from ..rollout_filter.groups import GroupStatistics

ALL = "all"
NUM_FIXED = 6
"""Number of intervals of ``fixed_rv``: [0, 1), [1, 2), ... and [5, infinity)."""


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


class BucketNumbers(TypedDict):
    """Measurements of the additive parts; ``norms`` and ``dots`` are per bucket, and the whole batch's last."""

    terms: list[str]
    norms: list[dict[str, float]]  # by term
    dots: list[dict[str, float]]  # inner products of two terms
    weights: list[list[float]]  # bucket x term
    losses: list[list[float]] | None  # bucket x term; None where the trainer's loss cannot be asked
    task_dots: list[list[float]]  # bucket x bucket
    forwards: int  # on each rank
    backwards: int


# ---- from the workers' numbers to the record, and to the guide's metric names


def bucket_records(
    numbers: BucketNumbers, buckets: dict[str, list[int]], groups: GroupStatistics, tokens: np.ndarray
) -> tuple[Bucket, ...]:
    """Return a record for each bucket (name -> groups), then for ``all``; ``tokens`` (R,) counts each row's."""
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
    scale = {term: 1 / weight[term] if weight[term] else 0.0 for term in terms}  # 0: no row has a response token
    loss: dict[str, float] = {}
    if numbers["losses"] is not None:
        losses = np.sum(numbers["losses"], axis=0).tolist() if is_all else numbers["losses"][index]
        pairs = zip(terms, losses, strict=True)
        loss = {"policy" if term == "task" else term: value * scale[term] for term, value in pairs}
        loss["total"] = sum(loss.values())
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
        loss=loss,
        cosine={pair: _cosine(dot, *(norms[term] for term in pair.split("_"))) for pair, dot in dots.items()},
    )


def _cosine(dot: float, left: float, right: float) -> float | None:
    """Return the cosine, in [-1, 1]; None where a gradient is zero or not finite."""
    product = left * right
    if not math.isfinite(product) or product == 0.0 or not math.isfinite(dot):
        return None
    return max(-1.0, min(1.0, dot / product))


def bucket_cosines(numbers: BucketNumbers) -> tuple[tuple[float | None, ...], ...]:
    """Return the cosines between buckets' task gradients (bucket x bucket); None where one is zero or not finite."""
    norms = [norms["task"] for norms in numbers["norms"][:-1]]
    return tuple(
        tuple(_cosine(dot, norms[row], norms[column]) for column, dot in enumerate(dots))
        for row, dots in enumerate(numbers["task_dots"])
    )


def group_table(buckets: dict[str, list[int]], groups: GroupStatistics) -> tuple[Group, ...]:
    """Return the guide's ``group_rv_table``: one line per group, in ascending order of deviation."""
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
    """Return the record's scalars under the guide's names, for any tracker; missing ones are left out."""
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
