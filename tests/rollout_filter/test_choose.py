# SPDX-License-Identifier: Apache-2.0
"""Grouping rollouts, and choosing which groups to train on."""

from dataclasses import replace

import numpy as np
import pytest

from gradloc.rollout_filter.choose import advantage_scale, best_run, fill_up, kept_groups, rank
from gradloc.rollout_filter.config import FilterSettings
from gradloc.rollout_filter.groups import GroupStatistics, group_rows


def make(std, reward=None, length=None):
    """Groups of given numbers, without rows."""
    count = len(std)
    return GroupStatistics(
        uids=tuple(f"p{group}" for group in range(count)),
        group_of_row=np.repeat(np.arange(count), 2),
        sizes=np.full(count, 2),
        reward_std=np.array(std, dtype=float),
        reward_mean=np.array(reward or [0.0] * count),
        length_mean=np.array(length or [1.0] * count),
    )


def test_groups_of_one_have_no_variance_to_tell_of():
    for sizes, is_told in (([1, 1], False), ([2, 2], True)):
        metrics, groups = {}, replace(make([0.0, 0.0]), sizes=np.array(sizes))
        assert kept_groups(groups, FilterSettings(), 1, metrics) is None
        assert bool(metrics) == is_told


def test_rows_of_a_prompt_need_not_stand_together():
    groups = group_rows(["a", "b", "a", "b", "c"], [0, 1, 1, 1, 5], [2, 4, 4, 4, 9])
    assert groups.uids == ("a", "b", "c")
    assert groups.group_of_row.tolist() == [0, 1, 0, 1, 2]
    assert groups.sizes.tolist() == [2, 2, 1]
    assert groups.reward_std == pytest.approx([0.5**0.5, 0, 0])  # unbiased; a single row deviates by 0
    assert groups.reward_mean == pytest.approx([0.5, 1, 5])
    assert groups.length_mean == pytest.approx([3, 4, 9])
    assert groups.zero_variance_share == pytest.approx(2 / 3)


def test_equal_rewards_deviate_by_exactly_zero():
    assert group_rows(["a"] * 3, [0.1] * 3, [1] * 3).reward_std[0] == 0.0


RISING = make([0.1, 0.2, 0.3, 0.4])
ZEROS = make([0.0, 0.5, 0.0, 0.1], reward=[9.0, 1.0, 8.0, 2.0])
NEGATIVE = make([1.0, 1.0, 1.0], reward=[-3.0, -1.0, -2.0])


@pytest.mark.parametrize(
    "groups, settings, expected",
    [
        # the shortest run that reaches the value; of 1.0 in all: 0.4, 0.7, 0.9, 1.0
        (make([0.3, 0.1, 0.2]), {}, [0, 2, 1]),
        (RISING, {"value": 0.9}, [3, 2, 1]),
        (RISING, {"value": 0.7}, [3, 2]),
        (RISING, {"value": 0.01}, [3]),
        (RISING, {"value": 0.5, "strategy": "top_k"}, [3, 2]),
        (RISING, {"value": 0.1, "strategy": "top_k"}, [3]),
        (RISING, {"value": 0.5, "strategy": "top_k", "type": "smallest"}, [0, 1]),
        # mirrored: the smallest weighs 0.4 of 1.0
        (RISING, {"value": 0.4, "type": "smallest"}, [0]),
        # softmax: 0.29, 0.55, 0.79, 1.0
        (RISING, {"value": 0.6, "top_p_prob_mode": "softmax"}, [3, 2, 1]),
        (RISING, {"value": 0.6, "top_p_prob_mode": "softmax", "type": "smallest"}, [0, 1, 2]),
        # groups of zero variance can be left out whatever the metric
        (ZEROS, {"include_zero": False}, [1, 3]),
        (ZEROS, {"include_zero": False, "metric": "reward"}, [3, 1]),
        (ZEROS, {"metric": "reward", "value": 0.5}, [0, 2]),
        # negative scores are lifted together, by 3: 0, 2, 1
        (NEGATIVE, {"metric": "reward", "value": 0.6}, [1]),
        (NEGATIVE, {"metric": "reward", "value": 0.7}, [1, 2]),
        # a group's length is its mean number of tokens
        (make([1.0] * 3, length=[5.0, 30.0, 10.0]), {"metric": "length", "value": 0.6}, [1]),
        # without any mass nothing is dropped, without a candidate nothing is kept
        (make([0.0, 0.0]), {"value": 0.5}, [0, 1]),
        (make([0.0, 0.0]), {"include_zero": False}, []),
    ],
    ids=lambda given: "" if isinstance(given, GroupStatistics) else str(given),
)
def test_the_filter_keeps_the_best_groups(groups, settings, expected):
    best_first, num_candidates = rank(groups, settings := FilterSettings(**settings))
    assert sorted(best_first) == list(range(len(groups)))
    assert best_run(groups, best_first[:num_candidates], settings).tolist() == expected


def test_groups_are_added_until_the_rows_divide():
    sizes, best_first = np.array([3, 3, 3, 3]), np.array([2, 0, 3, 1])
    assert fill_up(np.array([2]), best_first, sizes, 2).tolist() == [2, 0]
    assert fill_up(np.array([2]), best_first, sizes, 3).tolist() == [2]
    assert fill_up(np.array([2]), best_first, sizes, 12).tolist() == [2, 0, 3, 1]


def test_advantages_shrink_with_the_share_that_was_kept():
    assert advantage_scale("none", 0.25) == 1.0
    assert advantage_scale("linear", 0.25) == 0.25
    assert advantage_scale("sqrt", 0.25) == 0.5
