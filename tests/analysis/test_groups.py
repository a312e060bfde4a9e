# SPDX-License-Identifier: Apache-2.0
"""Grouping rollouts, dealing groups into buckets, and choosing which to train on."""

import numpy as np
import pytest

from tests.analysis.pure import load

groups_of = load("groups", "rollout_filter").group_rows
split = load("split", "analysis.buckets").split_groups
filtering = load("rank", "rollout_filter")


def make(std, reward=None, length=None, size=2):
    """Groups of given numbers, without rows."""
    count = len(std)
    return load("groups", "rollout_filter").Groups(
        uids=tuple(f"p{group}" for group in range(count)),
        of_row=np.repeat(np.arange(count), size),
        sizes=np.full(count, size),
        reward_std=np.array(std, dtype=float),
        reward_mean=np.array(reward or [0.0] * count),
        length_mean=np.array(length or [1.0] * count),
    )


def kept(groups, **settings):
    chosen = {
        "metric": "reward_variance",
        "order": "largest",
        "include_zero": True,
        "strategy": "top_p",
        "value": 1.0,
        "prob_mode": "linear",
        **settings,
    }
    scores, best = filtering.rank(groups, chosen["metric"], chosen["order"], chosen["include_zero"])
    return filtering.select(
        scores, best, chosen["strategy"], chosen["value"], chosen["order"], chosen["prob_mode"]
    ).tolist()


def test_rows_of_a_prompt_need_not_stand_together():
    groups = groups_of(["a", "b", "a", "b", "c"], [0, 1, 1, 1, 5], [2, 4, 4, 4, 9])
    assert groups.uids == ("a", "b", "c")
    assert groups.of_row.tolist() == [0, 1, 0, 1, 2]
    assert groups.sizes.tolist() == [2, 2, 1]
    assert groups.reward_std == pytest.approx([0.5**0.5, 0, 0])  # unbiased; a single row deviates by 0
    assert groups.reward_mean == pytest.approx([0.5, 1, 5])
    assert groups.length_mean == pytest.approx([3, 4, 9])
    assert groups.zero_variance_share == pytest.approx(2 / 3)


def test_equal_rewards_deviate_by_exactly_zero():
    assert groups_of(["a"] * 3, [0.1] * 3, [1] * 3).reward_std[0] == 0.0


def test_an_unfinite_reward_deviates_by_nan_and_counts_as_most():
    groups = groups_of(["a", "a", "b", "b"], [float("inf"), 0, 0, 1], [1] * 4)
    assert np.isnan(groups.reward_std[0])
    assert split(groups.reward_std, "quantile", 2) == {"bucket_1": [1], "bucket_2": [0]}
    assert split(groups.reward_std, "fixed_rv", 2) == {"bucket_1": [1], "bucket_6": [0]}


def test_no_row_gives_no_group_and_no_bucket():
    groups = groups_of([], [], [])
    assert len(groups) == 0
    assert groups.zero_variance_share == 0.0
    assert split(groups.reward_std, "quantile", 6) == {}
    assert split(groups.reward_std, "fixed_rv", 6) == {}


@pytest.mark.parametrize("num_groups", range(1, 15))
def test_quantile_buckets_cover_every_group_once_in_ascending_order(num_groups):
    std = np.random.default_rng(num_groups).permutation(num_groups).astype(float)
    buckets = split(std, "quantile", 6)
    assert list(buckets) == [f"bucket_{k}" for k in range(1, min(6, num_groups) + 1)]
    in_order = [group for members in buckets.values() for group in members]
    assert std[in_order].tolist() == sorted(std.tolist())
    sizes = [len(members) for members in buckets.values()]
    assert max(sizes) - min(sizes) <= 1


def test_all_equal_rewards_are_split_in_the_order_of_the_batch():
    assert split(np.zeros(5), "quantile", 2) == {"bucket_1": [0, 1, 2], "bucket_2": [3, 4]}


def test_fixed_buckets_are_intervals_closed_below_and_leave_out_empty_ones():
    std = np.array([0.0, 0.99, 1.0, 4.999, 5.0, 1e9])
    assert split(std, "fixed_rv", 3) == {"bucket_1": [0, 1], "bucket_2": [2], "bucket_5": [3], "bucket_6": [4, 5]}


def test_zero_one_rewards_all_fall_into_the_first_fixed_bucket():
    std = groups_of(["a", "a", "b", "b"], [0, 1, 1, 1], [1] * 4).reward_std
    assert list(split(std, "fixed_rv", 6)) == ["bucket_1"]


def test_value_one_with_zeros_included_keeps_all_that_carries_mass():
    assert kept(make([0.3, 0.1, 0.2])) == [0, 2, 1]


@pytest.mark.parametrize(
    "settings, expected",
    [
        # of 1.0 in all: 0.4, 0.7, 0.9, 1.0
        ({"value": 0.9}, [3, 2, 1]),
        ({"value": 0.7}, [3, 2]),
        ({"value": 0.01}, [3]),
        ({"value": 0.5, "strategy": "top_k"}, [3, 2]),
        ({"value": 0.1, "strategy": "top_k"}, [3]),
        ({"value": 0.5, "strategy": "top_k", "order": "smallest"}, [0, 1]),
        # mirrored: the smallest weighs 0.4 of 1.0
        ({"value": 0.4, "order": "smallest"}, [0]),
    ],
    ids=str,
)
def test_the_filter_keeps_the_shortest_run_that_reaches_the_value(settings, expected):
    assert kept(make([0.1, 0.2, 0.3, 0.4]), **settings) == expected


def test_softmax_mass_is_nearly_even_where_scores_are_small():
    scores = [0.1, 0.2, 0.3, 0.4]
    probability = np.exp(sorted(scores, reverse=True)) / np.exp(scores).sum()
    reached = np.cumsum(probability)
    assert reached[1] < 0.6 < reached[2]
    assert kept(make(scores), value=0.6, prob_mode="softmax") == [3, 2, 1]
    assert kept(make(scores), value=0.6, prob_mode="softmax", order="smallest") == [0, 1, 2]


def test_groups_of_zero_variance_can_be_left_out_whatever_the_metric():
    groups = make([0.0, 0.5, 0.0, 0.1], reward=[9.0, 1.0, 8.0, 2.0])
    assert kept(groups, include_zero=False) == [1, 3]
    assert kept(groups, include_zero=False, metric="reward") == [3, 1]
    assert kept(groups, metric="reward", value=0.5) == [0, 2]


def test_negative_scores_are_lifted_together():
    groups = make([1.0, 1.0, 1.0], reward=[-3.0, -1.0, -2.0])
    # lifted by 3: 0, 2, 1
    assert kept(groups, metric="reward", value=0.6) == [1]
    assert kept(groups, metric="reward", value=0.7) == [1, 2]


def test_length_ranks_by_mean_tokens():
    assert kept(make([1.0] * 3, length=[5.0, 30.0, 10.0]), metric="length", value=0.6) == [1]


def test_without_any_mass_nothing_is_dropped():
    assert kept(make([0.0, 0.0]), value=0.5) == [0, 1]


def test_without_a_candidate_nothing_is_kept():
    assert kept(make([0.0, 0.0]), include_zero=False) == []


def test_groups_are_added_until_the_rows_divide():
    sizes, best_first = np.array([3, 3, 3, 3]), np.array([2, 0, 3, 1])
    assert filtering.fill_up(np.array([2]), best_first, sizes, 2).tolist() == [2, 0]
    assert filtering.fill_up(np.array([2]), best_first, sizes, 3).tolist() == [2]
    assert filtering.fill_up(np.array([2]), best_first, sizes, 12).tolist() == [2, 0, 3, 1]


def test_advantages_shrink_with_the_share_that_was_kept():
    assert filtering.advantage_scale("none", 0.25) == 1.0
    assert filtering.advantage_scale("linear", 0.25) == 0.25
    assert filtering.advantage_scale("sqrt", 0.25) == 0.5
