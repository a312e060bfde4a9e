# SPDX-License-Identifier: Apache-2.0
"""Groups of rollouts in buckets of reward deviation."""

import numpy as np

from gradloc.analysis.buckets import split_groups
from gradloc.rollout_filter.groups import group_rows


def test_an_unfinite_reward_deviates_by_nan_and_counts_as_most():
    groups = group_rows(["a", "a", "b", "b"], [float("inf"), 0, 0, 1], [1] * 4)
    assert np.isnan(groups.reward_std[0])
    assert split_groups(groups.reward_std, "quantile", 2) == {"bucket_1": [1], "bucket_2": [0]}
    assert split_groups(groups.reward_std, "fixed_rv", 2) == {"bucket_1": [1], "bucket_6": [0]}


def test_no_row_gives_no_group_and_no_bucket():
    groups = group_rows([], [], [])
    assert len(groups) == 0
    assert groups.zero_variance_share == 0.0
    assert split_groups(groups.reward_std, "quantile", 6) == {}
    assert split_groups(groups.reward_std, "fixed_rv", 6) == {}


def test_quantile_buckets_cover_every_group_once_in_ascending_order():
    for num_groups in range(1, 15):
        std = np.random.default_rng(num_groups).permutation(num_groups).astype(float)
        buckets = split_groups(std, "quantile", 6)
        assert list(buckets) == [f"bucket_{k}" for k in range(1, min(6, num_groups) + 1)]
        in_order = [group for members in buckets.values() for group in members]
        sizes = [len(members) for members in buckets.values()]
        assert std[in_order].tolist() == sorted(std.tolist()) and max(sizes) - min(sizes) <= 1


def test_all_equal_rewards_are_split_in_the_order_of_the_batch():
    assert split_groups(np.zeros(5), "quantile", 2) == {"bucket_1": [0, 1, 2], "bucket_2": [3, 4]}


def test_fixed_buckets_are_intervals_closed_below_and_leave_out_empty_ones():
    std = np.array([0.0, 0.99, 1.0, 4.999, 5.0, 1e9])
    assert split_groups(std, "fixed_rv", 3) == {
        "bucket_1": [0, 1],
        "bucket_2": [2],
        "bucket_5": [3],
        "bucket_6": [4, 5],
    }
