# SPDX-License-Identifier: Apache-2.0
"""Buckets of groups by reward standard deviation. Pure.

What the guide calls reward variance is the standard deviation of a group's rewards, here as there.
"""

import numpy as np

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
