# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row are named: a few, a segment, or the whole of it."""

import random

import pytest
import torch

from gradloc.search.rows import Row, median, widened, window


def spans(values, weights=None, stands_out=True, errors=None):
    """Of a culprit's norm of 1 and a typical weight of 1; in other units they are the same."""
    weights = torch.ones(len(values)) if weights is None else torch.tensor(weights)
    values, errors = torch.tensor(values), torch.zeros(len(values)) if errors is None else torch.tensor(errors)
    found = Row(values, errors, weights, 1.0, 1.0).spans(stands_out)
    assert Row(4 * values, 4 * errors, 8 * weights, 8.0, 4.0).spans(stands_out) == found
    assert Row(-values, errors, weights, 1.0, 1.0).spans(stands_out) == found
    return found


def test_a_row_is_named_by_its_few_tokens_its_segment_or_as_a_sequence():
    quiet = [0.01] * 40
    assert spans(quiet) == []
    assert spans([*quiet, 5.0, *quiet]) == [(40, 41)]
    assert spans([5.0, *quiet, 5.0, *quiet, -9.0]) == [(0, 1), (41, 42), (82, 83)]
    assert spans([*quiet, *[3.0] * 16, *quiet]) == [(40, 56)], "a cluster is one segment"
    assert spans([*[3.0] * 4, 0.01, *[3.0] * 4, *quiet]) == [(0, 4), (5, 9)], "without its quiet inner token"
    assert spans([1.5] * 60) == [(0, 60)], "a spread row is no list of its loudest tokens"
    assert spans([0.1] * 60) == [(0, 60)], "nor is it overlooked when none of them is loud"
    assert spans([0.1] * 60, stands_out=False) == [], "unless all rows are like it"
    assert spans([4.0, -4.0, *quiet]) == [(0, 1), (1, 2)], "a pair that cancels"
    assert spans([4.0, *[0.01] * 8, 3.9, *quiet]) == [(0, 1), (9, 10)], "two tokens, not what is between"


def test_a_row_that_the_loss_weighs_more_as_a_whole_is_a_sequence():
    values = [2.0, 0.6, 1.5, 0.2, 0.3, 1.1, 0.4, 0.6, 0.3, 0.1]
    assert spans(values, [50.0] * 10) == [(0, 10)]
    assert spans(values, [50.0] * 7 + [0.0] * 3) == [(0, 10)], "clipped tokens aside"
    assert spans(values, [50.0] * 8 + [1.0] * 2) == [(0, 10)], "eight of ten are nearly all,"
    assert spans(values, [50.0] * 7 + [1.0] * 3) == [(0, 1), (2, 3), (5, 6)], "seven are not"
    loud = [9.0, *[0.01] * 9]
    assert spans(loud, [4.0] * 10) == [(0, 1)], "one token carries it, though the row weighs more"
    several = [9.0, 9.0, 9.0, 9.0, *[0.01] * 6]
    assert spans(several, [500.0] * 4 + [4.0] * 6) == [(0, 4)], "some of it weighs still more"


def test_a_row_that_is_nothing_without_its_three_loudest_tokens_is_no_sequence():
    assert spans([9.0, 9.0, 9.0] + [0.01] * 7, [50.0] * 10) == [(0, 1), (1, 2), (2, 3)]


def test_a_token_with_just_a_culprit_s_norm_is_named():
    quiet = [0.01] * 40
    assert spans([*quiet, 1.0, *quiet]) == [(40, 41)]
    assert spans([*quiet, 0.99, *quiet], stands_out=False) == []


def test_noise_leaves_a_token_in_a_run_but_ends_none():
    quiet, errors = [0.01] * 20, [0.0] * 20
    values = [*quiet, *[3.0] * 4, 0.3, *[3.0] * 4, *quiet]
    assert spans(values) == [(20, 24), (25, 29)]
    assert spans(values, errors=[*errors, *[0.0] * 4, 0.2, *[0.0] * 4, *errors]) == [(20, 29)]
    ends = [*quiet, 0.45, *[3.0] * 4, 0.45, *quiet]
    assert spans(ends) == [(20, 26)] and spans(ends, errors=[*errors, 0.2, *[0.0] * 4, 0.2, *errors]) == [(21, 25)]
    alone = [*quiet, 0.45, *quiet, *[3.0] * 4, *quiet]
    assert spans(alone, errors=[*errors, 0.2, *errors, *[0.0] * 4, *errors]) == [(41, 45)]


def test_a_run_s_bound_is_its_sum_less_independent_errors():
    row = Row(torch.tensor([3.0, -1.0, 0.5]), torch.tensor([0.3, 0.4, 2.0]), torch.ones(3), 1.0, 1.0)
    assert row.bound(0, 2) == pytest.approx(1.5) and row.bound(1, 2) == pytest.approx(0.6) and row.bound(2, 3) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_a_window_is_the_shortest_run_that_carries_nine_tenths_of_the_sum(seed):
    source = random.Random(seed)
    values = [source.choice([0.0, 0.1, 5.0]) if source.random() < 0.3 else 0.01 for _ in range(12)]
    runs = [(start, start + length) for length in range(1, 7) for start in range(13 - length)]
    wanted = next(((a, b) for a, b in runs if sum(values[a:b]) >= 0.9 * sum(values)), (0, 12))
    for sign in (1.0, -1.0):
        assert window(sign * torch.tensor(values, dtype=torch.float64)) == wanted


def test_a_run_is_widened_by_hints_beside_it_and_a_token_is_not():
    hinted = [True, True, False, False, False, True, True]
    assert widened(2, 5, hinted) == (0, 7) and widened(2, 3, hinted) == (2, 3)
    assert widened(3, 5, hinted) == (3, 7) and widened(2, 4, hinted) == (0, 4)
    assert widened(2, 4, [False, True, False, False, True, False]) == (1, 5)


def test_a_median_is_of_what_is_not_zero():
    assert median(torch.tensor([0.0, 5.0, 1.0, 0.0, 3.0])) == 3.0 and median(torch.zeros(3)) == 0.0
