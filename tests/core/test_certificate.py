# SPDX-License-Identifier: Apache-2.0
"""What a certificate says of the norm without the culprits, and how large it takes its own error to be."""

import math
from types import SimpleNamespace

import pytest
import torch

from gradloc.core.certificate import Removal, verdict_of
from gradloc.core.ranks import Ranks


@pytest.mark.parametrize(
    ("norm", "bound", "threshold", "verdict"),
    [
        (1.0, 0.0, 10.0, "explained"),
        (1.0, 4.4, 10.0, "explained"),
        (1.0, 4.6, 10.0, "undecided"),
        (19.0, 4.4, 10.0, "not_explained"),
        (19.0, 4.6, 10.0, "undecided"),
        (10.0, 0.0, 10.0, "undecided"),
        (math.nan, 0.0, 10.0, "not_explained"),
        (1.0, math.nan, 10.0, "undecided"),
        (1.0, 0.0, None, "undecided"),
    ],
)
def test_a_verdict_needs_a_bound_below_half_the_distance_to_the_threshold(norm, bound, threshold, verdict):
    assert verdict_of(norm, bound, threshold)[0] == verdict


@pytest.mark.parametrize(("norm_after", "verdict"), [(3.0, "explained"), (math.inf, "not_explained")])
def test_what_was_not_finite_is_explained_by_being_finite_where_there_is_no_threshold_yet(norm_after, verdict):
    assert verdict_of(norm_after, 0.1, None, was_finite=False)[0] == verdict


@pytest.mark.parametrize(
    ("norm_before", "threshold", "reason"),
    [(9.0, 4.0, "no culprit was found"), (9.0, None, "a rehearsal"), (math.nan, None, "no culprit was found")],
)
def test_without_culprits_the_norm_is_what_it_was_and_the_reason_says_why(norm_before, threshold, reason):
    found = Removal(prober_of(), [], 1.0, norm_before, threshold, []).certify()
    assert found.method == "none" and found.norm_after is found.norm_before and found.reason.startswith(reason)


def prober_of(**known):
    """Of four micro-batches with five tokens each, in float32."""
    mask = torch.ones(1, 5, dtype=torch.bool)
    step = SimpleNamespace(dtype=torch.float32, num_micro_batches=4, token_mask=lambda index: mask)
    space = SimpleNamespace(rounding=0.0, **known)
    return SimpleNamespace(step=step, space=space, ranks=Ranks(), reduction_error=0.0)
