# SPDX-License-Identifier: Apache-2.0
"""The rollouts of a batch, grouped by prompt, and how much each group's rewards differ.

Shapes: R rows (rollouts), G groups (prompts). Groups stand in the order in which their first row does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GroupStatistics:
    """Per-group numbers; every array is (G,) except ``group_of_row``."""

    uids: tuple[str, ...]
    group_of_row: np.ndarray
    """(R,) int: the group of each row."""
    sizes: np.ndarray
    """Rows per group, at least 1."""
    reward_std: np.ndarray
    """Unbiased standard deviation of the rows' rewards. Exactly 0 where all are equal and for a single row; NaN
    where a reward is not finite."""
    reward_mean: np.ndarray
    length_mean: np.ndarray
    """Mean number of response tokens."""

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def zero_variance_share(self) -> float:
        """Share of the groups whose rewards are all equal, in [0, 1]: under GRPO they teach nothing. 0 if empty."""
        return float(np.mean(self.reward_std == 0.0)) if len(self) else 0.0


def groups_of(uids: Sequence[str], token_scores: Any, response_mask: Any) -> GroupStatistics:
    """Group the rows of a batch by prompt.

    Args:
        uids: the prompt's name of each row; rows of a prompt need not stand together.
        token_scores: tensor (R, T), the rewards before any KL penalty.
        response_mask: tensor (R, T).
    """
    return group_rows(uids, token_scores.double().sum(-1).tolist(), response_mask.sum(-1).tolist())


def group_rows(uids: Sequence[str], rewards: Sequence[float], lengths: Sequence[int]) -> GroupStatistics:
    """Return the same by each row's reward and number of response tokens."""
    number: dict[str, int] = {}
    group_of_row = np.array([number.setdefault(str(uid), len(number)) for uid in uids], dtype=np.int64)
    reward, length = np.asarray(rewards, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    rows = [np.flatnonzero(group_of_row == group) for group in range(len(number))]
    return GroupStatistics(
        uids=tuple(number),
        group_of_row=group_of_row,
        sizes=np.array([len(members) for members in rows], dtype=np.int64),
        reward_std=np.array([_std(reward[members]) for members in rows], dtype=np.float64),
        reward_mean=np.array([reward[members].mean() for members in rows], dtype=np.float64),
        length_mean=np.array([length[members].mean() for members in rows], dtype=np.float64),
    )


def _std(values: np.ndarray) -> float:
    if not np.isfinite(values).all():
        return float("nan")
    # equal values must give 0, not the rounding error of their mean
    return 0.0 if np.ptp(values) == 0.0 else float(values.std(ddof=1))
