# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row are named: a few, a segment, or the whole of it."""

import torch

from gradloc.search.rows import Row


def spans(values, weights=None, stands_out=True):
    weights = torch.ones(len(values)) if weights is None else torch.tensor(weights)
    values = torch.tensor(values)
    return Row(values, torch.zeros_like(values), weights, 1.0, 1.0).spans(stands_out)


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
    assert spans(values, [50.0] * 8 + [0.0] * 2) == [(0, 10)], "clipped tokens aside"
    loud = [9.0, *[0.01] * 9]
    assert spans(loud, [4.0] * 10) == [(0, 1)], "one token carries it, though the row weighs more"
    several = [9.0, 9.0, 9.0, 9.0, *[0.01] * 6]
    assert spans(several, [500.0] * 4 + [4.0] * 6) == [(0, 4)], "some of it weighs still more"
