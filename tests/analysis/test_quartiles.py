# SPDX-License-Identifier: Apache-2.0
"""The plain arithmetic: which token belongs where, samples, correlations, changes."""

import numpy as np
import pytest

from gradloc.analysis import quartiles
from gradloc.record.analysis import Agreement


def slow_assign(probabilities, split):
    """By sorting, token by token."""
    ordered = sorted(probabilities)
    if split == "quantile":
        return [4 * ordered.index(pi) // len(ordered) for pi in probabilities]
    edges = [0.25, 0.5, 0.75]
    return [sum(pi > edge for edge in edges) for pi in probabilities]


@pytest.mark.parametrize("split", ["quantile", "range"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_assigned_as_by_sorting(split, seed):
    generator = np.random.default_rng(seed)
    log_prob = np.log(generator.random((7, 9)).round(1 + seed) * 0.98 + 0.01)  # with many ties
    mask = generator.random((7, 9)) < 0.7
    found = quartiles.assign(log_prob, mask, split)
    assert (found[~mask] == -1).all()
    assert found[mask].tolist() == slow_assign(np.exp(log_prob[mask]).tolist(), split)


@pytest.mark.parametrize(
    "probabilities, expected",
    [
        ([0.5], [0]),
        ([0.5, 0.4], [2, 0]),
        ([0.5, 0.4, 0.6], [1, 0, 2]),
        ([0.5] * 9, [0] * 9),
        ([0.1, 1.0, 1.0, 1.0], [0, 1, 1, 1]),
        ([], []),
    ],
    ids=["one token", "two", "three", "all equal", "most equal", "none"],
)
def test_equally_probable_tokens_stay_together_and_quartiles_may_be_empty(probabilities, expected):
    log_prob = np.log(np.array([probabilities]))
    mask = np.ones(log_prob.shape, bool)
    assert quartiles.assign(log_prob, mask, "quantile")[0].tolist() == expected


def test_the_ends_of_a_range_belong_to_the_lower_one_and_certainty_to_the_highest():
    log_prob = np.log(np.array([[0.25, 0.5, 0.75, 1.0, 1e-30]]))
    mask = np.ones(log_prob.shape, bool)
    assert quartiles.assign(log_prob, mask, "range")[0].tolist() == [0, 1, 2, 3, 0]
    above = quartiles.assign(log_prob * 0 + 1e-7, mask, "range")  # rounding may exceed 1
    assert (above == 3).all()


def test_log_probs_that_are_not_finite_are_refused_in_a_sentence_that_counts_them():
    log_prob = np.array([[np.nan, -1.0, -np.inf]])
    with pytest.raises(ValueError, match="found 2 of 3 response tokens without"):
        quartiles.assign(log_prob, np.ones((1, 3), bool), "quantile")
    masked = quartiles.assign(log_prob, np.array([[False, True, False]]), "quantile")
    assert masked.tolist() == [[-1, 0, -1]]


def test_samples_are_spread_over_the_quartiles_and_drawn_once():
    assigned = np.array([[0] * 10, [1] * 10, [2] * 10, [3] * 2 + [-1] * 8])
    found = quartiles.sample_tokens(assigned, 14, seed=3)
    assert np.bincount(assigned[tuple(found.T)], minlength=4).tolist() == [4, 4, 4, 2]
    assert len({tuple(place) for place in found.tolist()}) == 14
    again = quartiles.sample_tokens(assigned, 14, seed=3)
    other = quartiles.sample_tokens(assigned, 14, seed=4)
    assert (found == again).all() and (found != other).any()
    assert len(quartiles.sample_tokens(assigned, 1000, seed=0)) == 32
    assert quartiles.sample_tokens(assigned, 0, seed=0).shape == (0, 2)


def test_the_rank_correlation_is_that_of_pandas():
    pandas = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    for _ in range(5):
        left = generator.integers(0, 6, 40).astype(float)
        right = left + generator.integers(0, 9, 40)
        table = pandas.DataFrame({"left": left, "right": right}).corr(method="spearman")
        found = quartiles.rank_correlation(left, right)
        assert found == pytest.approx(table.loc["left", "right"])
    assert quartiles.rank_correlation(left, left * 0) is None
    assert quartiles.rank_correlation(left[:1], left[:1]) is None
    assert quartiles.rank_correlation(left, np.where(left > 3, np.nan, left)) is None


def test_agreement_is_one_with_itself_and_undefined_with_nothing():
    change = np.array([0.1, -0.2, 0.0])
    found = quartiles.agreement(-2 * change, change)
    assert (found.correlation, found.ratio) == (pytest.approx(-1.0), pytest.approx(2.0))
    assert quartiles.agreement(change, change * 0) == Agreement(correlation=None, ratio=None)
    assert quartiles.agreement(change * np.nan, change).correlation is None


def test_every_change_is_counted_in_a_bin():
    changes = [np.array([0.0, 0.3, -0.1]), np.array([-0.4, np.nan])]
    edges = quartiles.change_edges(changes)
    assert edges[0] == -0.4 and edges[-1] == 0.4
    found = quartiles.distribution(changes[0], np.array([1.0, 2.0, 0.0]), edges)
    assert sum(found.counts) == 3
    assert found.right_way == 0.5, "of the two tokens with an advantage, one moved as it says"
    nothing = np.zeros(5)
    still = quartiles.distribution(nothing, nothing, quartiles.change_edges([nothing]))
    assert (still.counts, still.right_way) == ((5,), None)
    assert quartiles.distribution(nothing[:0], nothing[:0], edges) is None
